"""Which kernels the steps of a model use in place of torch's own operations (`runtime/kernels`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from pictool.runtime import kernels
from pictool.runtime.attention import RowsKernel, Scoring
from pictool.runtime.graphs.buffers import NUM_STAGED
from pictool.runtime.graphs.placing import PlaceKernel, Placing
from pictool.runtime.kernels.pairing import pairings
from pictool.runtime.stack import LayerStack

_log = logging.getLogger("pictool")


@dataclass(frozen=True)
class Kernels:
    """What there is a kernel for; None: torch's own operations do it."""

    attend: RowsKernel | None = None
    place: PlaceKernel | None = None


def kernels_of(stack: LayerStack) -> Kernels:
    """The kernels for a model on its device; none if Triton cannot compile one there, as without a C compiler."""
    if not kernels.available() or (torch.cuda.is_available() and stack.device.type != "cuda"):
        return Kernels()
    from pictool.runtime.kernels.rows_attention import rows_attention

    one = torch.ones(1, 1, 1, 64, dtype=stack.dtype, device=stack.device)
    try:
        rows_attention(one, one, one, torch.zeros(1, dtype=torch.int64, device=stack.device), Scoring())
    except Exception as error:
        _log.warning("links continue without Triton's kernels, which fail (%s: %s)", type(error).__name__, error)
        return Kernels()
    return Kernels(rows_attention, _place_of(stack))


def _place_of(stack: LayerStack) -> PlaceKernel | None:
    """What puts staged layers to their places in one launch; None: no kernel rotates as the model does."""
    from pictool.runtime.kernels.place import Places, place

    found = pairings(stack, stack.rotary_tables(torch.arange(2, device=stack.device)))
    if found is None:
        return None
    rotated, kinds = int(not stack.geometry.parts[0].rotated), stack.rotary_kinds

    def put(placing: Placing, layer: int) -> None:
        places = Places(placing.start, placing.token, placing.length, placing.target, placing.unit)
        slab, kind = placing.slab, kinds[layer]
        staging = placing.staging.buffers if placing.is_coded else placing.staging.numbers
        staged, table = staging[layer % NUM_STAGED], slab.tables.of_kind[kind]
        place(staged, places, found[kind], table, slab.keys[layer], slab.values[layer], rotated)

    return put
