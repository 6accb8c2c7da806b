"""`link()`: resolve objects → lay out → select → for each layer: load, relocate, compute rows, narrow → logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from pictool.compiler.compile import CODEC, Compiled, head_codec
from pictool.compiler.sensitivity import PROBES
from pictool.core import Chunk, Layout, RowMask
from pictool.errors import InputError, ObjectError, RemoteError
from pictool.linker.chain import PromptChain
from pictool.linker.fusor import Fusor
from pictool.linker.loader import Loader, Placed
from pictool.linker.policies.base import Policy, Prompt, Scores, Selection, Table
from pictool.linker.resolve import Document, Part, open_objects, resolve_documents
from pictool.runtime.image import Image
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Timing:
    """Seconds of a link. `ttft_s` is the whole, from the request to the first token's logits.

    load_s: opening objects, and waiting for layers. select_s: resolving, laying out, choosing rows (a speculative
    model's scoring among it). recompute_s: computing rows. fetch_s: reading, checking and relocating in the loader's
    threads, most of it while rows are chosen and computed.
    """

    load_s: float
    select_s: float
    recompute_s: float
    ttft_s: float
    fetch_s: float


@dataclass(frozen=True)
class Linked:
    """A linked prompt. `rows` is bool [layers, n]: whose K and V were computed at each layer; `scores` float32 [n].

    `bytes_read` is KV that was read from objects; what host memory held is not among it. `texts` are those of head,
    chunks and tail.
    """

    image: Image
    policy: Policy
    parts: tuple[Part, ...]
    texts: tuple[str, ...]
    rows: RowMask
    scores: Scores | None
    timing: Timing
    bytes_read: int

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
    codec: str = CODEC,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Linked:
    """Link documents into a prompt: head + documents + tail, each tokenized on its own (DESIGN §2 rule 1).

    What a remote does not give whole is compiled here instead, with a warning (`Store.on_warning`); the time that was
    lost on it counts as load.

    Args:
        documents: chunks, text files, object files or keys, in prompt order. Texts are compiled first if need be.
        tail: text behind the documents; always computed in full.
        head: text before the documents; compiled like a chunk, at position 0.
        sinks: dummy tokens of objects compiled from texts here (default: what the policy wants).
        codec: how the KV of texts is kept. The head's is always kept without loss: it is exact under every policy.
        on_compile: called for each object that had to be compiled.

    Raises:
        PicError: an unusable document or object, or a prompt that is too long for the model.
    """
    _ = model.stack, model.target, model.eos_ids  # loaded before the clock starts
    policy.prepare(model)
    run = partial(_link, model, store, documents, tail, policy, head, sinks, chunk_tokens, codec, on_compile)
    clock = _Clock()
    while True:
        try:
            return run(clock)
        except RemoteError as error:  # of an object that was to be read while it came
            store.refuse(error)
            clock.load_s += clock.lap()


def _link(
    model: Model, store: Store, documents: Sequence[Document], tail: str, policy: Policy, head: str, sinks: int | None,
    chunk_tokens: int | None, codec: str, on_compile: Callable[[Compiled], None] | None, clock: _Clock,
) -> Linked:  # fmt: skip
    sinks = policy.sinks if sinks is None else sinks
    probes = PROBES if policy.uses_tables else 0
    parts = resolve_documents(model, store, documents, sinks, chunk_tokens, codec, probes)
    prompt_head = Part(Chunk(head, model.encode(head), "head"), None, 0, head_codec(codec))
    layout = lay_out(model, prompt_head.chunk, [part.chunk for part in parts], model.encode(tail))
    prompt = Prompt(model, layout, (head, *(part.chunk.text for part in parts), tail))
    if policy.chain_block:
        return _link_chain(store, prompt, tuple(parts), policy, clock)
    selection = None if policy.is_slow or policy.uses_tables else policy.select(prompt)
    clock.select_s += clock.lap()
    reused = _reused(policy, prompt, [prompt_head, *parts], selection)
    files, compile_s = open_objects(model, store, [part for part, _ in reused], on_compile)
    clock.load_s += clock.lap() - compile_s
    clock.compile_s += compile_s
    placed = [Placed(file, start) for file, (_, start) in zip(files, reused, strict=True)]
    return _fuse(store, Image(model.stack, layout), placed, prompt, tuple(parts), policy, selection, clock)


def _link_chain(store: Store, prompt: Prompt, parts: tuple[Part, ...], policy: Policy, clock: _Clock) -> Linked:
    """Link behind the stored beginning of the prompt, in place of objects; what was computed is then stored."""
    chain = PromptChain(prompt.model, store, prompt.layout, policy.chain_block)
    clock.select_s += clock.lap()
    while True:
        placed = chain.open()
        image = Image(prompt.model.stack, prompt.layout)
        image.keep_keys()
        cached = replace(prompt, cached=len(placed) * policy.chain_block)
        try:
            linked = _fuse(store, image, placed, cached, parts, policy, None, clock)
        except ObjectError:
            if not chain.skip_damaged():
                raise
        else:
            chain.keep(image, linked.rows[0])
            return linked


def _fuse(
    store: Store, image: Image, placed: Sequence[Placed], prompt: Prompt, parts: tuple[Part, ...], policy: Policy,
    selection: Selection | None, clock: _Clock,
) -> Linked:  # fmt: skip
    """Layer by layer: load, relocate, compute rows, narrow; then the logits."""
    stack = image.stack
    first = _first_layer(policy, stack.num_layers, selection)
    with Loader(image, placed, first, overlaps=policy.is_slow, memory=store.memory) as loader:
        clock.load_s += clock.lap()
        prompt = replace(prompt, tables=_tables(placed, prompt.layout) if policy.uses_tables else ())
        fusor = Fusor(image, prompt, policy, selection or policy.select(prompt))
        clock.select_s += clock.lap()
        for layer in range(stack.num_layers):
            clock.load_s += loader.synchronize(layer)
            fusor.prefill_layer(layer)
        fusor.finish()
        if stack.device.type == "cuda":
            torch.cuda.synchronize(stack.device)
        timing = clock.timing(loader.busy_s)
    return Linked(image, policy, parts, prompt.texts, fusor.rows, fusor.scores, timing, loader.bytes_read)


def _tables(placed: Sequence[Placed], layout: Layout) -> tuple[Table | None, ...]:
    """The table of every chunk's object, in prompt order."""
    at = {one.start: one.file for one in placed}
    return tuple(at[start].fixups() for start, end in layout.chunks if start < end)


class _Clock:
    """Seconds of the parts of one link."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.load_s = self.select_s = self.compile_s = 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last

    def timing(self, fetch_s: float) -> Timing:
        """What it comes to, now that the first token's logits are there; compiling does not count."""
        ttft_s = time.perf_counter() - self._started - self.compile_s
        return Timing(self.load_s, self.select_s, ttft_s - self.select_s - self.load_s, ttft_s, fetch_s)


def _reused(
    policy: Policy, prompt: Prompt, parts: Sequence[Part], selection: Selection | None
) -> list[tuple[Part, int]]:
    """The parts of which something is, or may be, reused or compared; and where each starts."""
    spans = zip(parts, [prompt.layout.head, *prompt.layout.chunks], strict=True)
    may_be_any = selection is None or bool(policy.check_layers(prompt.model.stack.num_layers))
    return [
        (part, start)
        for part, (start, end) in spans
        if start < end and (may_be_any or (selection is not None and not selection.rows[start:end].all()))
    ]


def _first_layer(policy: Policy, num_layers: int, selection: Selection | None) -> int:
    """The first layer at which anything cached is used: the first checked one, if all rows are computed till there."""
    checked = policy.check_layers(num_layers)
    return checked[0] if checked and selection is not None and selection.rows.all() else 0


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
