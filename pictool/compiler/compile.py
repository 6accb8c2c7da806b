"""Compiling chunks to objects in a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pictool.compiler.chunking import make_chunk, make_chunks, read_text
from pictool.compiler.sensitivity import TableMaker
from pictool.core import Chunk, CompileOptions
from pictool.errors import InputError, PicError
from pictool.runtime import turns
from pictool.store.codecs import require_codec
from pictool.store.codecs.base import LayerShape
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
    return model.key(chunk.tokens, options.sinks, options.codec, options.cut)


def chunks_of_files(model: Model, paths: Iterable[str | Path], chunk_tokens: int | None = None) -> list[Chunk]:
    """The chunks of UTF-8 files: one a file, or pieces of at most `chunk_tokens` tokens."""
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
    probe_model: Model | None = None,
    on_done: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compile chunks (or texts) to objects. What the store already has, undamaged, costs no model run.

    Args:
        options: sinks, codec, probes. An object in the store without the table that is needed is compiled again.
        force: compute and replace also what the store has.
        alone: each chunk in a forward of its own, so that its last bits do not depend on what is compiled with it.
        check: read and check all of the objects that the store has; else their headers only. Damaged ones are compiled
            again, with a warning (`Store.on_warning`).
        probe_model: measures the chunks, by their text; the target's speculative model if it is known, else the target.
        on_done: called for each chunk as soon as its object is in the store.

    Raises:
        InputError: a text without tokens or too long; sinks for a model without BOS; an unknown codec; one probe.
        ModelError: the probe model cannot be opened.
        StoreError: the store cannot be written.
    """
    listed = [chunk if isinstance(chunk, Chunk) else make_chunk(model, chunk, "text") for chunk in chunks]
    prefix = _require_compilable(model, listed, options)
    keys = [object_key(model, chunk, options) for chunk in listed]
    table_maker = TableMaker.of(model, options.probes, probe_model)
    missing = dict(zip(keys, listed, strict=True))
    if not force:
        stored = _stored(store, keys, table_maker, store.has_whole if check else store.has)
        missing = {key: chunk for key, chunk in missing.items() if key not in stored}
    results = [Compiled(c, key, store.path(key), key in missing) for key, c in zip(keys, listed, strict=True)]
    computed = _compute(model, missing, prefix, options, alone, table_maker)
    _put_all(model, store, results, computed, on_done or (lambda _: None))
    return results


def compute_chunks(
    model: Model, chunks: Mapping[str, Chunk], options: CompileOptions = CompileOptions()
) -> Iterator[CompiledChunk]:
    """Compute chunks, by their keys (`object_key`), and write them nowhere; each is there as soon as it is ready.

    Raises:
        InputError or ModelError, as `compile_chunks`.
    """
    prefix = _require_compilable(model, chunks.values(), options)
    return _compute(model, chunks, prefix, options, False, TableMaker.of(model, options.probes))


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


def _stored(store: Store, keys: Iterable[str], table_maker: TableMaker, has: Callable[[str], bool]) -> set[str]:
    """The keys of those that the store has, or can fetch from its remote; some are prefetched."""
    unique, stored = list(dict.fromkeys(keys)), set()
    for at in range(0, len(unique), _PREFETCHED):
        group = unique[at : at + _PREFETCHED]
        store.prefetch(group)
        stored |= {key for key in group if has(key) and _has_table(store, key, table_maker)}
    return stored


def _has_table(store: Store, key: str, table_maker: TableMaker) -> bool:
    """Whether the object in the store has this maker's table, if one is needed."""
    try:
        with store.peek(key) as file:
            return table_maker.recipe in (None, file.meta.fixups)
    except PicError:  # evicted meanwhile
        return False


def _compute(
    model: Model, missing: Mapping[str, Chunk], prefix: Sequence[int], options: CompileOptions, alone: bool,
    table_maker: TableMaker,
) -> Iterator[CompiledChunk]:  # fmt: skip
    if not missing:
        return
    cut = model.cut_of(options.cut)
    keys, tables = list(missing), table_maker.tables(missing, alone)
    dummy = prefix[0] if prefix else None
    for index, layers, maps in _prefill(model, [missing[key].tokens for key in keys], prefix, cut, alone):
        key = keys[index]
        chunk, table = missing[key], tables.get(key)
        salted = model.identify(chunk.tokens, len(prefix), options.codec, cut).salted if model.salt else None
        meta = ObjectMeta(
            key, model.target, len(chunk), len(prefix), options.codec, table_maker.recipe, dummy=dummy, salted=salted,
            cut=cut,
        )  # fmt: skip
        tokens, fixups = np.asarray(chunk.tokens, dtype=np.int32), None if table is None else table.tobytes()
        pairs = _layer_bytes(model, chunk, layers)
        states = [_state_bytes(model, meta, chunk, stored) for stored in maps]
        model.require_storable()
        if table_maker.measurer is not model:
            table_maker.measurer.require_storable()
        yield CompiledChunk(meta, chunk.text, tokens, pairs, fixups, states)


def _prefill(
    model: Model, chunks: Sequence[Sequence[int]], prefix: Sequence[int], cut: int | None, alone: bool
) -> Iterator[tuple[int, ChunkKV, list[StateMap]]]:
    """Compute chunks; yields (index, KV, maps of the linear layers' states from the cut on) as they are ready."""
    if cut is None:
        yield from ((index, layers, []) for index, layers in model.prefill(chunks, prefix, alone))
        return
    from pictool.runtime.prefill import prefill_stateful

    for index, tokens in enumerate(chunks):
        yield index, *prefill_stateful(model.stack, tokens, cut)


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


def sink_tokens(model: Model, sinks: int) -> list[int]:
    """The dummy tokens before a chunk.

    Raises:
        InputError: fewer than none, or a model without BOS.
    """
    if sinks < 0:
        raise InputError(f"sinks {sinks}: must be 0 or more")
    if sinks and model.bos_id is None:
        raise InputError(f"{model.name}: has no BOS token, so documents cannot be compiled with sinks")
    if sinks >= model.max_positions:
        raise InputError(f"sinks {sinks:,d}: the model takes {model.max_positions:,d} tokens in all; use fewer")
    return [model.bos_id] * sinks if model.bos_id is not None else []


def _require_compilable(model: Model, chunks: Collection[Chunk], options: CompileOptions) -> list[int]:
    """Refuse what cannot be compiled so; returns the dummy tokens before each chunk. Raises InputError."""
    prefix, room = sink_tokens(model, options.sinks), model.max_positions
    if model.geometry.states is not None and options.sinks:
        raise InputError(f"{model.name}: a hybrid's chunks are compiled without sinks")
    require_codec(options.codec)
    for chunk in chunks:
        if len(chunk) + options.sinks > room:
            raise InputError(
                f"{chunk.source}: {len(chunk)} tokens and {options.sinks} sinks, but the model takes {room} positions; "
                "cut it with --chunk-tokens"
            )
    return prefix
