"""The start-up check: in this server's own model and blocks, a link of two layers against full, before any request.

What a version of vLLM may have changed shows here: the layout of its blocks, how they are written, what its attention
is told of runs of rows, how its layers are called, how it rotates. If the two differ, nothing is linked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pictool.core import RowMask, TokenIds
from pictool.engines.vllm.needs import WORKER
from pictool.engines.vllm.request import Problem
from pictool.engines.vllm.worker.forward import Hidden, PromptBatch, RowForward, RowSet, Work
from pictool.engines.vllm.worker.worker import KVCapture
from pictool.errors import PicError
from pictool.needs import missing

LAYERS = 2
LEAST_TOKENS = 48
ROWS = 7 / 8  # of the rows that are compared must be alike: near a tie, experts of a row may change with its batch
# The norm of a row's difference over that of the row, for float32, for dtypes of 16 bits, and over a coded KV cache. A
# link whose blocks are wrong has about 1.
TOLERANCE, OF_16_BITS, OF_CODED = 0.01, 0.05, 0.3
_log = logging.getLogger("vllm.pictool")


def make_forward(make: Callable[[], RowForward], max_tokens: int) -> RowForward | Problem:
    """A forward that links as it should, or why there is none: then every request is computed exactly.

    Args:
        max_tokens: the longest prompt of the server.

    Raises:
        PicError: a model or an attention backend that is refused by name.
    """
    import vllm

    started = time.perf_counter()
    try:
        if lacks := missing(WORKER):
            raise AttributeError(f"it lacks {', '.join(lacks)}")
        forward = make()
        deviation = link_deviation(forward, max_tokens)
        problem = (
            None if deviation <= (most := _tolerance(forward)) else f"they differ by {deviation:.2g}, {most} is allowed"
        )
    except PicError:
        raise
    except Exception as error:
        _log.warning("pic: unexpected", exc_info=error)
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        _log.info("pic: a link of two layers is full's within %.1g (%.2f s)", deviation, time.perf_counter() - started)
        return forward
    told = f"vLLM {vllm.__version__}: a link at start-up was not full's ({problem}); every prompt is computed exactly"
    _log.error("pic: %s", told)
    return Problem("links are declined: the server's check at start-up failed; see its log", told)


@torch.inference_mode()
def link_deviation(forward: RowForward, max_tokens: int) -> float:
    """By how much a link differs from full after some layers: the norm of a row's difference over that of the row.

    The link is of the KV of the full prefill, so that all rows must come out the same: written to other blocks, in
    another order, two rows of three from un-rotated keys, the others computed in two runs.
    """
    model, block = forward.model, forward.model.cache_spec.block_size
    num_tokens = min(max(block + block // 2, LEAST_TOKENS), max_tokens, block * ((model.num_blocks - 1) // 2))
    per_prompt = -(-num_tokens // block)
    tokens = np.random.default_rng(0).integers(
        model.config.model_config.get_vocab_size(), size=num_tokens, dtype=np.int32
    )
    own, other = range(1, per_prompt + 1), range(2 * per_prompt, per_prompt, -1)  # vLLM's block 0 is nobody's
    rows, capture = np.ones(num_tokens, dtype=bool), KVCapture(model)
    with capture.hooks():
        full = _drive(_hidden(forward, tokens, own, rows))
    end = np.arange(num_tokens) >= 3 * num_tokens // 4
    computed = end.copy()
    computed[num_tokens // 4 : num_tokens // 3] = True
    reused = torch.from_numpy(np.flatnonzero(~computed))
    slots, positions = model.slots(other, reused), reused.to(model.device)
    for layer, keys, values in zip(model.layers[:LAYERS], capture.keys, capture.values, strict=False):
        key, value = (torch.cat(parts)[positions].view(len(reused), layer.attention.num_kv_heads, -1)
                      for parts in (keys, values))  # fmt: skip
        model.write(layer, model.rotate(layer, model.as_stored(key), positions), value, slots)
    linked = _drive(_hidden(forward, tokens, other, computed))
    again = _drive(_hidden(forward, tokens, own, end))  # the link has written nothing to the blocks of full
    return max(_deviation(full, linked, computed), _deviation(full, again, end))


def _hidden(forward: RowForward, tokens: TokenIds, blocks: Sequence[int], mask: RowMask) -> Work[Hidden]:
    """Hidden states of the rows in `mask` after the first layers."""
    batch, rows = PromptBatch.of([tokens], [blocks]), RowSet.of([mask])
    hidden = yield from forward.embed(batch, rows)
    for layer in forward.model.layers[:LAYERS]:
        hidden = yield from forward.run_layer(batch, rows, layer, hidden)
    return hidden


def _drive(work: Work[Hidden]) -> Hidden:
    """Let a forward compute every piece whole."""
    piece = next(work)
    while True:
        try:
            piece = work.send(piece.rows)
        except StopIteration as done:
            hidden: Hidden = done.value
            return hidden


def _deviation(full: Hidden, part: Hidden, mask: RowMask) -> float:
    """Between full's rows in `mask` and those that were computed alone; infinite if any is not a number."""
    expected = full.of(np.flatnonzero(mask))
    off = [_relative(expected.states, part.states)]
    if expected.residual is not None and part.residual is not None:
        off.append(_relative(expected.residual, part.residual))
    return max(off)


def _relative(expected: Tensor, own: Tensor) -> float:
    off = (expected.float() - own.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(off.nan_to_num(torch.inf).quantile(ROWS, interpolation="higher"))


def _tolerance(forward: RowForward) -> float:
    config = forward.model.config
    if str(config.cache_config.cache_dtype).startswith("fp8"):
        return OF_CODED
    return TOLERANCE if config.model_config.dtype == torch.float32 else OF_16_BITS
