"""One request, measured: linked, and continued by some tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pictool.bench.floor import link_flops
from pictool.bench.workload import require_disk
from pictool.compiler.compile import CODEC, compile_chunks
from pictool.compiler.fixups import PROBES
from pictool.controller.calibration import drop_page_cache, token_bytes
from pictool.core import Chunk
from pictool.linker.grid import Labelled
from pictool.linker.link import Linked, link
from pictool.linker.policies import object_kinds
from pictool.linker.policies.base import Policy, Stage, no_stage
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.memory import PeakMemory
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

PLAIN = "transformers"  # the label of its own generate


@dataclass(frozen=True)
class Sample:
    """What one request took. `rows` is the mean per layer over the whole prompt; what is not known of it is None.

    Fields:
        load_s, select_s, recompute_s, fetch_s: as of `Timing`.
        bytes_read: of KV, from objects. flops: of the rows, see `link_flops`. tokens: generated.
        peak_bytes: beyond what was in use before.
    """

    ttft_s: float
    rows: float
    bytes_read: int
    flops: float
    decode_tokens_per_s: float | None
    peak_bytes: int | None
    tokens: tuple[int, ...]
    load_s: float | None = None
    select_s: float | None = None
    recompute_s: float | None = None
    fetch_s: float | None = None


@dataclass(frozen=True)
class Prompt:
    """Documents and a query; the documents' objects are in the store."""

    store: Store
    chunks: tuple[Chunk, ...]
    tail: str

    def ids(self, model: Model) -> list[int]:
        """The tokens of the whole prompt."""
        return [*(token for chunk in self.chunks for token in chunk.tokens), *model.encode(self.tail)]


def compile_for(model: Model, store: Store, chunks: Sequence[Chunk], policies: Sequence[Labelled]) -> None:
    """Put the objects into the store that these policies reuse.

    Raises:
        InputError: they do not fit on its disk.
    """
    kinds = object_kinds([labelled.policy for labelled in policies], CODEC, PROBES)
    store.root.mkdir(parents=True, exist_ok=True)
    require_disk(store.root, len(kinds) * sum(map(len, chunks)) * token_bytes(model))
    for kind in kinds:
        compile_chunks(model, store, chunks, kind)


def settle(model: Model) -> None:
    """Wait until the device has done what it was asked to."""
    if model.device.startswith("cuda"):
        torch.cuda.synchronize(model.device)


def link_prompt(model: Model, prompt: Prompt, policy: Policy, is_cold: bool, stage: Stage = no_stage) -> Linked:
    if is_cold:
        drop_page_cache(prompt.store.path(key) for key in prompt.store.keys())
    settle(model)
    return link(model, prompt.store, Spec.raw(prompt.chunks, prompt.tail, policy), stage=stage)


def run_linked(model: Model, prompt: Prompt, policy: Policy, new_tokens: int, is_cold: bool = False) -> Sample:
    """Link a prompt, and decode `new_tokens`; the speed of decoding is of those after the first."""
    with PeakMemory(model.device) as peak:
        linked = link_prompt(model, prompt, policy, is_cold)
        started = time.perf_counter()
        tokens = generate(model, linked.image, new_tokens).tokens if new_tokens else ()
        settle(model)
        decode_s = time.perf_counter() - started
    timing, steps = linked.timing, len(tokens) - 1
    return Sample(
        ttft_s=timing.ttft_s, load_s=timing.load_s, select_s=timing.select_s, recompute_s=timing.recompute_s,
        fetch_s=timing.fetch_s, rows=float(linked.rows.sum(1).mean()), bytes_read=linked.bytes_read,
        flops=link_flops(model, linked.rows, policy.check_layers(len(linked.rows)), linked.image.layout.num_context),
        decode_tokens_per_s=steps / decode_s if steps > 0 else None, peak_bytes=peak.bytes, tokens=tokens,
    )  # fmt: skip
