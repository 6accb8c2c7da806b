"""Compiling chunks to objects in a store."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pictool.compiler.chunking import make_chunk, make_chunks, read_text
from pictool.compiler.contexts import contexts_of
from pictool.core import Chunk, CompileOptions, Contexts
from pictool.errors import InputError
from pictool.runtime import turns
from pictool.store.codecs import require_codec
from pictool.store.codecs.base import LayerShape
from pictool.store.eviction import unmark_learned
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.sources import Source, add_sources
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.memory.states import StateMap
    from pictool.runtime.model import Model
    from pictool.runtime.prefill import ChunkKV

CODEC = "none"  # unless another is chosen
_PREFETCHED = 32  # objects that a remote is asked for at once
_WRITERS = 8  # threads that put objects, of at most so many bytes together
_WRITTEN_BYTES = 64 << 20


@dataclass(frozen=True)
class Compiled:
    """One chunk and its object; `is_new` if this call computed it."""

    chunk: Chunk
    key: str
    path: Path
    is_new: bool


OnCompile = Callable[[Compiled], None]  # called for each object that had to be compiled


def head_codec(codec: str) -> str:
    """The codec of the head of documents with this one: always lossless, since the head is exact under every policy."""
    return codec if require_codec(codec).is_lossless else CODEC


def object_key(model: Model, chunk: Chunk, options: CompileOptions = CompileOptions()) -> str:
    """The key under which this chunk's object is stored. Loads no weights."""
    name = model.encoder, model.salt, options
    if name not in chunk.keys:
        after = contexts_of(model, chunk, options)
        chunk.keys[name] = model.key(chunk.ids, options.codec, options.cut, after)
    return chunk.keys[name]


def chunks_of_files(model: Model, paths: Iterable[str | Path], chunk_tokens: int | None = None) -> list[Chunk]:
    """The chunks of UTF-8 files: one per file, or pieces of at most `chunk_tokens` tokens."""
    files = [(str(path), read_text(Path(path))) for path in paths]
    return [chunk for source, text in files for chunk in make_chunks(model, text, source, chunk_tokens)]


def compile_chunks(
    model: Model,
    store: Store,
    chunks: Iterable[Chunk | str],
    options: CompileOptions = CompileOptions(),
    *,
    force: bool = False,
    alone: bool = False,
    check: bool = True,
    on_done: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compile chunks (or texts) to objects. What the store already has, undamaged, costs no model run.

    Args:
        options: how they are compiled.
        force: compute and replace also what the store has.
        alone: each chunk in a forward of its own, so that its last bits do not depend on what is compiled with it.
        check: read and check all of the objects that the store has; else their headers only. Damaged ones are compiled
            again, with a warning (`Store.on_warning`).
        on_done: called for each chunk as soon as its object is in the store.

    Raises:
        InputError: a text without tokens or too long; an unknown context or codec.
        StoreError: the store cannot be written.
    """
    listed = [chunk if isinstance(chunk, Chunk) else make_chunk(model, chunk, "text") for chunk in chunks]
    before = _require_compilable(model, listed, options)
    keys = [object_key(model, chunk, options) for chunk in listed]
    missing = dict(zip(keys, listed, strict=True))
    unmark_learned(store.root, keys)
    if not force:
        stored = _stored(store, keys, store.has_whole if check else store.has)
        missing = {key: chunk for key, chunk in missing.items() if key not in stored}
    results = [Compiled(c, key, store.path(key), key in missing) for key, c in zip(keys, listed, strict=True)]
    computed = _compute(model, missing, dict(zip(keys, before, strict=True)), options, alone)
    _put_all(model, store, results, computed, on_done or (lambda _: None))
    return results


def compute_chunks(
    model: Model, chunks: Mapping[str, Chunk], options: CompileOptions = CompileOptions()
) -> Iterator[CompiledChunk]:
    """Compute chunks, by their keys (`object_key`), and write them nowhere; each is there as soon as it is ready.

    Raises:
        InputError or ModelError, as `compile_chunks`.
    """
    before = dict(zip(chunks, _require_compilable(model, chunks.values(), options), strict=True))
    return _compute(model, chunks, before, options, alone=False)


def _put_all(
    model: Model, store: Store, results: Sequence[Compiled], computed: Iterable[CompiledChunk],
    report: Callable[[Compiled], None],
) -> None:  # fmt: skip
    """Put chunks into the store as they are computed, and report each; those that it has already come first."""
    for result in results:
        if not result.is_new:
            report(result)
    missing = {result.key: result for result in results if result.is_new}
    sources: dict[str, Source] = {}

    def put(chunk: CompiledChunk) -> str:
        store.put(chunk)
        key = chunk.meta.key
        sources[key] = Source(missing[key].chunk.source, model.name)
        return key

    at_once = _WRITERS if store.max_bytes is None else 0  # what is evicted is reported before
    try:
        with closing(_put_while_computing(put, computed, at_once)) as keys:
            for key in keys:
                report(missing[key])
                turns.checkpoint("turn")
    finally:  # also of those that are there when it is interrupted
        if sources and not model.salt:
            add_sources(store.root, sources)


def _put_while_computing(
    put: Callable[[CompiledChunk], str], computed: Iterable[CompiledChunk], at_once: int
) -> Generator[str]:
    """Put chunks, and yield what `put` returns, in their order. If one fails, the others come before the error.

    Of small ones threads put `at_once` while the next are computed: a put waits for the disk, several wait together.
    """
    waiting: deque[Future[str]] = deque()
    with ThreadPoolExecutor(_WRITERS, "pic-writer") as writers:
        try:
            for chunk in computed:
                waiting.append(writers.submit(put, chunk))
                num_bytes = sum(len(part) for parts in (*chunk.layers, *chunk.states) for part in parts)
                while len(waiting) > min(at_once, _WRITTEN_BYTES // num_bytes):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except Exception:
            yield from (future.result() for future in waiting if future.exception() is None)
            raise


def _stored(store: Store, keys: Iterable[str], has: Callable[[str], bool]) -> set[str]:
    """The keys of those that the store has, or can fetch from its remote; some are prefetched."""
    unique, stored = list(dict.fromkeys(keys)), set()
    for at in range(0, len(unique), _PREFETCHED):
        group = unique[at : at + _PREFETCHED]
        store.prefetch(group)
        stored |= set(filter(has, group))
    return stored


def _compute(
    model: Model, missing: Mapping[str, Chunk], before: Mapping[str, Contexts], options: CompileOptions, alone: bool
) -> Iterator[CompiledChunk]:
    """Compute chunks, each after its contexts in `before`."""
    if not missing:
        return
    cut = model.cut_of(options.cut)
    keys = list(missing)
    contexts = [before[key] or ((),) for key in keys]
    for index, layers, maps in _prefill(model, [missing[key].tokens for key in keys], contexts, cut, alone):
        key = keys[index]
        chunk = missing[key]
        salted = model.identify(chunk.tokens, options.codec, cut, before[key]).salted if model.salt else None
        meta = ObjectMeta(key, model.target, len(chunk), options.codec, salted=salted, cut=cut, after=before[key])
        tokens = np.asarray(chunk.tokens, dtype=np.int32)
        pairs = _layer_bytes(model, chunk, layers)
        states = [_state_bytes(model, meta, chunk, stored) for stored in maps]
        model.require_storable()
        yield CompiledChunk(meta, chunk.text, tokens, pairs, states)


def _prefill(
    model: Model, chunks: Sequence[Sequence[int]], contexts: Sequence[Contexts], cut: int | None, alone: bool
) -> Iterator[tuple[int, ChunkKV, list[StateMap]]]:
    """Compute chunks, each after its contexts, of which the mean is kept.

    Yields:
        (index, KV, maps of the linear layers' states from the cut on) as they are ready.
    """
    if cut is None:
        runs = [(index, context) for index, own in enumerate(contexts) for context in own]
        done: dict[int, list[ChunkKV]] = defaultdict(list)
        for run, layers in model.prefill([chunks[index] for index, _ in runs], [own for _, own in runs], alone):
            index = runs[run][0]
            done[index].append(layers)
            if len(done[index]) == len(contexts[index]):
                yield index, _mean(done.pop(index)), []
        return
    from pictool.runtime.prefill import prefill_stateful

    for index, tokens in enumerate(chunks):
        yield index, *prefill_stateful(model.stack, tokens, cut)


def _mean(found: Sequence[ChunkKV]) -> ChunkKV:
    """The mean of a chunk's KV after several contexts, of each layer's parts."""
    if len(found) == 1:
        return found[0]
    return [
        tuple(sum(part.float() for part in same).div(len(found)).to(same[0].dtype) for same in zip(*pairs, strict=True))
        for pairs in zip(*found, strict=True)
    ]


def _state_bytes(model: Model, meta: ObjectMeta, chunk: Chunk, stored: StateMap) -> tuple[memoryview, ...]:
    """The bytes of a linear layer's tensors. Raises NotFiniteError."""
    import torch

    from pictool.runtime.tensors import require_finite, to_bytes

    named = {"tail": stored.tail, "operator": stored.operator, "state": stored.state}
    tensors = [
        tensor.to(getattr(torch, meta.state_dtype(name))) for name, tensor in named.items() if tensor is not None
    ]  # fmt: skip
    for tensor in tensors:
        require_finite(f"{chunk.source}: {model.name}", model.dtype, tensor)
    return tuple(map(to_bytes, tensors))


def _layer_bytes(model: Model, chunk: Chunk, layers: ChunkKV) -> list[tuple[memoryview, ...]]:
    """The bytes of every layer's keys and values, all in one piece of memory. Raises NotFiniteError."""
    import torch

    from pictool.runtime.tensors import require_finite, to_bytes

    numbers = torch.cat([part.flatten() for pair in layers for part in pair])  # each [kv_heads, tokens, head_dim]
    require_finite(f"{chunk.source}: {model.name}", model.dtype, numbers)
    data, shape = to_bytes(numbers), LayerShape.of(model.geometry, len(chunk), model.dtype)
    return [shape.split(data[start : start + shape.num_bytes]) for start in range(0, len(data), shape.num_bytes)]


def _require_compilable(model: Model, chunks: Collection[Chunk], options: CompileOptions) -> list[Contexts]:
    """Refuse what cannot be compiled so; returns the contexts of each chunk. Raises InputError."""
    room = model.max_positions
    require_codec(options.codec)
    for chunk in chunks:
        if len(chunk) > room:
            raise InputError(
                f"{chunk.source}: {len(chunk)} tokens, but the model has {room} positions left; cut it with "
                "--chunk-tokens"
            )
    return [contexts_of(model, chunk, options) for chunk in chunks]
