"""From a link to its trace, and back: the link of a trace done again, row by row, and checked by its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from pictool.compiler.compile import Compiled, compile_chunks
from pictool.core import Chunk, CompileOptions, RowMask
from pictool.errors import TraceError
from pictool.linker.link import Linked, link
from pictool.linker.policies.base import Deviation, Policy, Prompt, Selection
from pictool.linker.spec import Spec
from pictool.runtime.decode import Generated
from pictool.runtime.pieces import pieces_of
from pictool.store.codecs import codecs
from pictool.store.store import Store
from pictool.trace.format import Candidate, Trace, TracedChunk, TracedToken

if TYPE_CHECKING:
    from pictool.runtime.model import Model

NUM_CANDIDATES = 10
# How far the logits of a repeated link may be off, as a share of their standard deviation: other threads, batches or
# devices round otherwise.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}


def trace_of(
    model: Model, linked: Linked, logits: torch.Tensor, generated: Generated, report: Mapping[str, Any]
) -> Trace:
    """The trace of one link and of what was decoded from it; `logits` are those at the last prompt token."""
    layout = linked.image.layout
    parts = pairwise([*layout.starts, layout.num_tokens])
    chunks = [
        TracedChunk(part.chunk.source, part.key(model), part.options.sinks, part.options.codec) for part in linked.parts
    ]
    decoded = pieces_of(model.tokenizer, generated.tokens)
    top = logits.topk(min(NUM_CANDIDATES, len(logits))).indices.tolist()
    return Trace(
        target=model.target,
        layout=layout,
        rows=linked.rows,
        logits=logits.float().cpu().numpy(),
        scores=linked.scores,
        texts=linked.texts,
        chunks=tuple(chunks),
        pieces=tuple(
            piece for start, end in parts for piece in pieces_of(model.tokenizer, layout.tokens[start:end].tolist())
        ),
        generated=tuple(map(TracedToken, generated.tokens, decoded, generated.logprobs)),
        top=tuple(Candidate(token, pieces_of(model.tokenizer, [token])[0]) for token in top),
        report=report,
    )


@dataclass(frozen=True)
class Replay(Policy):
    """What another policy did: exactly the rows of a trace, layer by layer. It is not in the registry."""

    name: ClassVar[str] = "replay"
    reference: ClassVar[str] = ""
    rows: RowMask  # [layers, N]

    def select(self, prompt: Prompt) -> Selection:
        return Selection(self.rows[0])

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        """Where the rows get fewer; what was dropped at the last layer changes no K, V or logits."""
        return tuple(layer for layer in range(num_layers - 1) if (self.rows[layer] != self.rows[layer + 1]).any())

    def narrow(self, prompt: Prompt, layer: int, deviation: Deviation) -> Selection:
        return Selection(self.rows[layer + 1])


def replay(
    model: Model, store: Store, trace: Trace, name: str, on_compile: Callable[[Compiled], None] | None = None
) -> Linked:
    """Do the link of a trace again: the same objects (compiled first, where the store lacks them), the same rows.

    Args:
        name: what messages call the trace.

    Raises:
        TraceError: another model, or logits that are not those of the trace.
        PicError: an object that is damaged.
    """
    trace.require(model.target, name)
    linked = _link(model, store, trace, name, Replay(trace.rows[:, : trace.layout.num_context]), on_compile)
    _require_same_logits(linked, trace, name)
    return linked


def link_in_full(model: Model, store: Store, trace: Trace, name: str) -> Linked:
    """Full recompute of a trace's prompt."""
    trace.require(model.target, name)
    everything = np.ones((trace.target.geometry.layers, trace.layout.num_context), dtype=bool)
    return _link(model, store, trace, name, Replay(everything), None)


def _link(
    model: Model, store: Store, trace: Trace, name: str, policy: Replay, on_compile: Callable[[Compiled], None] | None
) -> Linked:
    objects = _objects(model, store, trace, name, on_compile)
    linked = link(model, store, Spec.raw(objects, trace.texts[-1], policy, trace.texts[0]))
    if not np.array_equal(linked.image.layout.tokens, trace.layout.tokens):
        raise TraceError(f"{name}: its texts are not those of its tokens, so the link cannot be repeated; link again")
    return linked


def _objects(
    model: Model, store: Store, trace: Trace, name: str, on_compile: Callable[[Compiled], None] | None
) -> Sequence[str]:
    """The paths of the chunks' objects, in order."""
    keys = []
    for one, text, (start, end) in zip(trace.chunks, trace.texts[1:-1], trace.layout.chunks, strict=True):
        if one.codec not in codecs():
            raise TraceError(
                f"{name}: {one.source} was linked with the codec {one.codec}, which this pic does not have"
            )
        chunk = Chunk(text, tuple(trace.layout.tokens[start:end].tolist()), one.source)
        (done,) = compile_chunks(model, store, [chunk], CompileOptions(one.sinks, one.codec))
        if done.key != one.key:
            raise TraceError(
                f"{name}: {one.source} was linked from the object {one.key[:12]}, but it is {done.key[:12]}"
            )
        if done.is_new and on_compile:
            on_compile(done)
        keys.append(str(done.path))
    return keys


def _require_same_logits(linked: Linked, trace: Trace, name: str) -> None:
    assert linked.image.logits is not None
    found = linked.image.logits.float().cpu().numpy()
    if found.shape != trace.logits.shape:
        raise TraceError(f"{name}: has {len(trace.logits)} logits, but the model {len(found)}; link again with --trace")
    apart, scale = float(np.abs(found - trace.logits).max()), float(trace.logits.std())
    if not apart <= TOLERANCE[trace.target.dtype] * scale:
        raise TraceError(
            f"{name}: the link cannot be repeated: its logits are {apart:.2g} apart from those of the trace (allowed: "
            f"{TOLERANCE[trace.target.dtype] * scale:.2g}); link again with --trace"
        )
