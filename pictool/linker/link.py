"""`link()`: resolve objects → lay out → select → for each layer: load, relocate, compute rows → logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pictool.compiler.compile import Compiled
from pictool.core import Chunk, Layout, RowMask
from pictool.errors import InputError
from pictool.linker.loader import Loader, Placed
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import Document, Part, require_objects, resolve_documents
from pictool.runtime.attention import Rows
from pictool.runtime.image import Image
from pictool.store.format import ObjectFile
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Timing:
    """Seconds of a link: reading and relocating objects, choosing rows, computing them; `ttft_s` is the whole."""

    load_s: float
    select_s: float
    recompute_s: float
    ttft_s: float


@dataclass(frozen=True)
class Linked:
    """A linked prompt. `rows` is bool [layers, n]: what was computed at each layer."""

    image: Image
    policy: Policy
    parts: tuple[Part, ...]
    rows: RowMask
    timing: Timing

    @property
    def recomputed(self) -> float:
        """Mean number of context rows (head and chunks) that were computed per layer."""
        return float(self.rows[:, : self.image.layout.num_context].sum(1).mean())


def link(
    model: Model,
    store: Store,
    documents: Sequence[Document],
    tail: str,
    policy: Policy,
    *,
    head: str = "",
    sinks: int | None = None,
    chunk_tokens: int | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Linked:
    """Link documents into a prompt: head + documents + tail, each tokenized on its own (DESIGN §2 rule 1).

    Args:
        documents: chunks, text files, object files or keys, in prompt order. Texts are compiled first if need be.
        tail: text behind the documents; always computed in full.
        head: text before the documents; compiled like a chunk, at position 0.
        sinks: dummy tokens of objects compiled from texts here (default: what the policy wants).
        on_compile: called for each object that had to be compiled.

    Raises:
        PicError: an unusable document or object, or a prompt that is too long for the model.
    """
    stack, *_ = model.stack, model.target, model.eos_ids  # loaded before the clock starts
    started = time.perf_counter()
    sinks = policy.sinks if sinks is None else sinks
    parts = resolve_documents(model, store, documents, sinks, chunk_tokens)
    prompt_head = Part(Chunk(head, model.encode(head), "head"), None, 0)
    layout = lay_out(model, prompt_head.chunk, [part.chunk for part in parts], model.encode(tail))
    rows = select_rows(model, layout, policy)
    selected = time.perf_counter()
    spans = zip([prompt_head, *parts], [layout.head, *layout.chunks], strict=True)
    reused = [(part, start) for part, (start, end) in spans if not rows[start:end].all()]
    paths = require_objects(model, store, [part for part, _ in reused], on_compile)
    compiled = time.perf_counter()
    placed = [Placed(_open(model, path, part.chunk), start) for path, (part, start) in zip(paths, reused, strict=True)]
    with Loader(model, placed) as loader:
        image = Image(stack, layout)
        load_s = _compute(image, loader, rows)
    _synchronize(model)
    done = time.perf_counter()
    timing = Timing(load_s, selected - started, done - compiled - load_s, done - compiled + selected - started)
    return Linked(image, policy, tuple(parts), np.tile(rows, (stack.num_layers, 1)), timing)


def lay_out(model: Model, head: Chunk, chunks: Sequence[Chunk], tail: Sequence[int]) -> Layout:
    """Where everything stands.

    Raises:
        InputError: the prompt has no tail, or is longer than the model's positions.
    """
    if not tail:
        raise InputError("the query and its template have no tokens; there is nothing to answer")
    layout = Layout.of(head.tokens, [chunk.tokens for chunk in chunks], tail)
    if layout.num_tokens > model.max_positions:
        raise InputError(
            f"the prompt has {layout.num_tokens} tokens, but {model.name} takes {model.max_positions} positions; "
            "link fewer or shorter documents"
        )
    return layout


def select_rows(model: Model, layout: Layout, policy: Policy) -> RowMask:
    """bool [n]: what the policy selects of the context, and the whole tail.

    The head is exact without being computed, unless the model's RoPE depends on the length of the prompt.
    """
    rows = np.ones(layout.num_tokens, dtype=bool)
    rows[: layout.num_context] = policy.select(layout)
    if model.stack.is_length_dependent(layout.head[1], layout.num_tokens):
        rows[: layout.head[1]] = True
    return rows


def _open(model: Model, path: Path, chunk: Chunk) -> ObjectFile:
    file = ObjectFile(path)
    try:
        file.meta.require(model.target, str(path))
        if tuple(file.tokens()) != chunk.tokens:
            raise InputError(f"{path}: was replaced while it was being linked; run the command again")
    except BaseException:
        file.close()
        raise
    return file


def _compute(image: Image, loader: Loader, mask: RowMask) -> float:
    """The passes over the layers; returns the seconds spent on loading and relocating."""
    stack, load_s = image.stack, 0.0
    rows = Rows.of(torch.from_numpy(np.flatnonzero(mask))).to(stack.device)
    tokens = torch.from_numpy(image.layout.tokens[mask].astype(np.int64)).to(stack.device)
    hidden = stack.embed(tokens[None])
    for layer in range(stack.num_layers):
        before = time.perf_counter()
        for start, key, value in loader.fetch_kv(layer):
            image.place(layer, start, key, value)
        load_s += time.perf_counter() - before
        hidden = image.compute(layer, hidden, rows)
    image.logits = stack.logits(hidden[0, -1:])[0]
    return load_s


def _synchronize(model: Model) -> None:
    if model.device.startswith("cuda"):
        torch.cuda.synchronize()
