"""Record the trace of a link, and replay the link of a trace: the same rows, checked by the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from pictool.compiler.compile import Compiled, compile_chunks, object_key
from pictool.compiler.contexts import contexts_of
from pictool.core import Chunk, CompileOptions, GeneratedChunk, PromptText, RowMask, Separator
from pictool.errors import PicError, TraceError
from pictool.linker.link import Linked, link
from pictool.linker.policies.base import Deviation, Policy, Prompt, Selection
from pictool.linker.resolve import Part
from pictool.linker.spec import Document, Spec
from pictool.runtime.decode import Generated
from pictool.runtime.encoder import pieces_of
from pictool.store.codecs import codecs
from pictool.store.store import Store
from pictool.trace.format import Candidate, GeneratedToken, Trace, TracedChunk

if TYPE_CHECKING:
    from pictool.runtime.model import Model

NUM_CANDIDATES = 10
# The largest difference of the logits of a replay, as a share of their standard deviation: other threads, batches or
# devices round differently.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}


def record_trace(
    model: Model, linked: Linked, logits: torch.Tensor, generated: Generated, report: Mapping[str, Any]
) -> Trace:
    """Make the trace of a link and of the tokens generated after it; `logits` are those at the last prompt token."""
    layout = linked.image.layout
    parts = pairwise([*layout.starts, layout.num_tokens])
    chunks = [
        TracedChunk(
            part.chunk.source, _key_of(model, part), part.options.codec, contexts_of(model, part.chunk, part.options)
        )
        for part in linked.parts
    ]
    texts = pieces_of(model.tokenizer, generated.tokens)
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
        generated=tuple(map(GeneratedToken, generated.tokens, texts, generated.logprobs)),
        top=tuple(Candidate(token, pieces_of(model.tokenizer, [token])[0]) for token in top),
        report=report,
    )


def _key_of(model: Model, part: Part) -> str:
    return "" if part.is_separator else part.generated or part.key(model)


@dataclass(frozen=True)
class Replay(Policy):
    """Select exactly the rows of a trace, layer by layer. This policy is not in the registry."""

    name: ClassVar[str] = "replay"
    reference: ClassVar[str] = ""
    rows: RowMask  # [layers, N]

    def select(self, prompt: Prompt) -> Selection:
        return Selection(self.rows[0])

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers after which there are fewer rows; those dropped at the last layer change no K, V or logits."""
        return tuple(layer for layer in range(num_layers - 1) if (self.rows[layer] != self.rows[layer + 1]).any())

    def narrow(self, prompt: Prompt, layer: int, deviation: Deviation) -> Selection:
        return Selection(self.rows[layer + 1])


def replay(
    model: Model, store: Store, trace: Trace, name: str, on_compile: Callable[[Compiled], None] | None = None
) -> Linked:
    """Repeat the link of a trace: the same objects (compiled first if the store lacks them), the same rows.

    Args:
        name: the trace's in messages. on_compile: called with every object that had to be compiled again.

    Raises:
        TraceError: another model, or logits that are not those of the trace.
        PicError: an object that is damaged.
    """
    trace.require(model.target, name)
    linked = _link(model, store, trace, name, Replay(trace.rows[:, : trace.layout.num_context]), on_compile)
    _require_same_logits(linked, trace, name)
    return linked


def replay_in_full(model: Model, store: Store, trace: Trace, name: str) -> Linked:
    """Link the prompt of a trace under full recompute; for the errors see `replay`."""
    trace.require(model.target, name)
    all_rows = np.ones((trace.target.geometry.layers, trace.layout.num_context), dtype=bool)
    return _link(model, store, trace, name, Replay(all_rows), None)


def _link(
    model: Model, store: Store, trace: Trace, name: str, policy: Replay, on_compile: Callable[[Compiled], None] | None
) -> Linked:
    model.require_no_states("replays of traces")
    objects = _objects(model, store, trace, name, on_compile)
    head, tail = _written(model, trace)
    linked = link(model, store, Spec.raw(objects, tail, policy, head))
    if not np.array_equal(linked.image.layout.tokens, trace.layout.tokens):
        raise TraceError(f"{name}: its texts do not match its tokens, so the link cannot be repeated; link again")
    return linked


def _written(model: Model, trace: Trace) -> tuple[PromptText, PromptText]:
    """The head and tail of a trace, whose tokens tell which markers in them are control tokens."""
    encoder, ends = model.encoder, np.cumsum([0, *map(len, trace.pieces)])
    controls = set(ends[:-1][np.isin(trace.layout.tokens, [*encoder.control.values()])].tolist())

    def written(text: str, start: int, end: int) -> PromptText:
        tokens, before = tuple(trace.layout.tokens[start:end].tolist()), len(encoder.prefix_text)
        markers = encoder.markers(text)
        quoted = PromptText(text, tuple(span for span in markers if ends[start] + span[0] not in controls))
        forms = (PromptText(text), quoted, replace(quoted.cut(before), begins=True))
        return next((form for form in forms if model.encode(form) == tokens), quoted)

    return written(trace.texts[0], *trace.layout.head), written(trace.texts[-1], *trace.layout.tail)


def _objects(
    model: Model, store: Store, trace: Trace, name: str, on_compile: Callable[[Compiled], None] | None
) -> Sequence[Document]:
    """Return the chunks' objects, in order, and the separators between them."""
    objects: list[Document] = []
    for traced, text, (start, end) in zip(trace.chunks, trace.texts[1:-1], trace.layout.chunks, strict=True):
        ids = tuple(trace.layout.tokens[start:end].tolist())
        if not traced.key:
            objects.append(Separator(text, ids, traced.source))
            continue
        if traced.codec not in codecs():
            raise TraceError(
                f"{name}: {traced.source} was linked with the codec {traced.codec}, which this pic does not have"
            )
        chunk = Chunk(text, ids, traced.source)
        options = CompileOptions(traced.codec, after=traced.after)
        if object_key(model, chunk, options) != traced.key:  # nothing is compiled under another key
            if _is_generated(model, store, chunk, traced.key):
                objects.append(GeneratedChunk(text, chunk.tokens, traced.source, traced.key))
                continue
            raise TraceError(
                f"{name}: {traced.source} was linked from the object {traced.key[:12]}, which matches neither its "
                "tokens and this salt nor a generated object in the store; pass the salt it was linked with "
                "(--salt-file), or link again with --trace"
            )
        (compiled,) = compile_chunks(model, store, [chunk], options)
        if compiled.is_new and on_compile:
            on_compile(compiled)
        objects.append(str(compiled.path))
    return objects


def _is_generated(model: Model, store: Store, chunk: Chunk, key: str) -> bool:
    """Whether the store has a generated object of this key, chunk and salt."""
    try:
        with store.peek(key) as file:
            meta = file.meta
    except PicError:
        return False
    ids = np.asarray(chunk.tokens, dtype=np.int32)
    return meta.parent is not None and key == (
        model.target.identify_block(ids, meta.parent, meta.rotation or "", model.salt).key
    )


def _require_same_logits(linked: Linked, trace: Trace, name: str) -> None:
    assert linked.image.logits is not None
    logits = linked.image.logits.float().cpu().numpy()
    if logits.shape != trace.logits.shape:
        raise TraceError(
            f"{name}: has {len(trace.logits)} logits, but the model has {len(logits)}; link again with --trace"
        )
    apart = float(np.abs(logits - trace.logits).max())
    allowed = TOLERANCE[trace.target.dtype] * float(trace.logits.std())
    if not apart <= allowed:
        raise TraceError(
            f"{name}: the link cannot be repeated: its logits are {apart:.2g} apart from those of the trace (allowed: "
            f"{allowed:.2g}); link again with --trace"
        )
