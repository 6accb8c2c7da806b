"""What a worker of a bulk compile does: batches of documents to objects at the remote. One model for its lifetime.

Knows nothing of Ray: it is called with documents, and returns rows of the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from pictool.cluster.loading import ModelSpec
from pictool.cluster.manifest import ManifestRow
from pictool.cluster.sources import SourceDocument
from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import compute_chunks, object_key
from pictool.core import Chunk, CompileOptions
from pictool.errors import InputError, PicError, StoreError
from pictool.store.objects.format import EncodedObject, encode_object
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Signed

if TYPE_CHECKING:
    from pictool.runtime.model import Model

T = TypeVar("T")
MOST_DEATHS = 3  # of workers that compile a document; it is left out then
_CONNECTIONS = 8  # to the remote, of a worker
_MOST_UNSENT = 256 << 20  # bytes of objects in memory that are not sent yet; computing waits for a slow remote


@dataclass(frozen=True)
class BulkSpec:
    """How documents are compiled, and where to: the same for all workers.

    Fields:
        force: compute also what the remote has.
    """

    model: ModelSpec
    remote: Remote
    options: CompileOptions = CompileOptions()
    chunk_tokens: int | None = None
    overlap: int = 0
    force: bool = False


def compile_counted(
    compile: Callable[[Sequence[SourceDocument]], list[ManifestRow]],
    documents: Sequence[SourceDocument],
    tags: Sequence[int],
    begin: Callable[[str], int],
    end: Callable[[str], object],
) -> list[ManifestRow]:
    """Compile a batch; after a worker's death, its documents one by one, so that it is known which of them kills.

    Args:
        tags: of the documents, each another one's, and the same when they are tried again.
        begin, end: of an attempt by name. `begin` returns how many attempts have not ended: each killed a worker.
    """
    batch = f"batch {tags}"
    has_killed = begin(batch)
    try:
        if not has_killed:
            return compile(documents)
        return [
            row
            for document, tag in zip(documents, tags, strict=True)
            for row in _compile_one(compile, document, f"document {tag}", begin, end)
        ]
    finally:
        end(batch)


def _compile_one(
    compile: Callable[[Sequence[SourceDocument]], list[ManifestRow]],
    document: SourceDocument,
    name: str,
    begin: Callable[[str], int],
    end: Callable[[str], object],
) -> list[ManifestRow]:
    """Compile a document whose batch has crashed once. A skipped document stays counted for the next attempt."""
    if 1 + begin(name) >= MOST_DEATHS:
        error = f"{document.id}: {MOST_DEATHS} workers died while compiling it or its batch"
        return [ManifestRow.failed(document.id, error, document.num_bytes)]
    try:
        return compile([document])
    finally:
        end(name)


class CompileWorker:
    """Compiles batches of documents. Creating one is cheap; the first batch loads the model."""

    def __init__(self, spec: BulkSpec) -> None:
        self._spec, self._digests = spec, dict[str, str]()
        self._sending = ThreadPoolExecutor(_CONNECTIONS, "pic-send")

    @cached_property
    def model(self) -> Model:
        """Raises InputError or ModelError: it is not what the driver has."""
        return self._spec.model.load()

    def close(self) -> None:
        """End its threads."""
        self._sending.shutdown()

    def compile(self, documents: Sequence[SourceDocument]) -> list[ManifestRow]:
        """Compile documents. A document that fails becomes a row with its error.

        Raises:
            PicError: the model cannot be opened, so that nothing can be compiled.
        """
        started, model = time.perf_counter(), self.model
        cut = [self._cut(model, document) for document in documents]
        chunks = {key: chunk for parts in cut if not isinstance(parts, str) for key, chunk in parts}
        there = {} if self._spec.force else self._present(list(chunks))
        made = self._compile(model, {key: chunk for key, chunk in chunks.items() if key not in there})
        seconds = (time.perf_counter() - started) / len(documents)
        rows, results, new = [], {**there, **made}, set(made)
        for document, parts in zip(documents, cut, strict=True):
            rows += _rows(document, parts, results, new, seconds)
        digests, self._digests = self._digests, {}
        return [replace(row, digest=digests[row.key]) if row.key is not None and row.is_new else row for row in rows]

    def _cut(self, model: Model, document: SourceDocument) -> list[tuple[str, Chunk]] | str:
        """The keys and chunks of a document, or its error."""
        if document.text is None:
            return document.error or "has no text"
        try:
            chunks = make_chunks(model, document.text, document.id, self._spec.chunk_tokens, self._spec.overlap)
            room = model.max_positions
            if too_long := [chunk for chunk in chunks if len(chunk) > room]:
                return f"{too_long[0].source}: {len(too_long[0])} tokens, but the model has {room} positions"
        except InputError as error:
            return str(error)
        return [(object_key(model, chunk, self._spec.options), chunk) for chunk in chunks]

    def _present(self, keys: Sequence[str]) -> dict[str, int | PicError]:
        """Bytes of the objects that the remote has, or why it cannot tell."""
        found = self._sending.map(lambda key: _tried(partial(self._spec.remote.whole_bytes, key)), keys)
        return {key: size for key, size in zip(keys, found, strict=True) if size is not None}

    def _compile(self, model: Model, missing: Mapping[str, Chunk]) -> dict[str, int | PicError]:
        """Compile chunks, and send each object to the remote while the next is computed: its bytes, or its error."""
        if not missing:
            return {}
        _ = model.stack  # weights that cannot be loaded are no document's problem
        sent, room = dict[str, Future[int]](), _Room(_MOST_UNSENT)

        def compile_and_send(chunks: Mapping[str, Chunk]) -> None:
            for done in compute_chunks(model, chunks, self._spec.options):
                encoded = encode_object(done)
                self._digests[done.meta.key] = Signed.of_object(encoded).digest
                room.take(encoded.num_bytes)
                sent[done.meta.key] = self._sending.submit(self._send, encoded, room)

        failed: dict[str, PicError] = {}
        try:
            compile_and_send(missing)
        except PicError:  # of one of them: each by itself
            for key, chunk in missing.items():
                try:
                    if key not in sent:
                        compile_and_send({key: chunk})
                except PicError as error:
                    failed[key] = error
        return {key: failed[key] if key in failed else _tried(sent[key].result) for key in missing}

    def _send(self, encoded: EncodedObject, room: _Room) -> int:
        """Write an object to the remote, and see that one of its key is there, whole; returns the bytes of that."""
        remote, key = self._spec.remote, encoded.meta.key
        try:
            remote.write(key, encoded)
            size = encoded.num_bytes if remote.has_same(encoded) else remote.another(encoded)  # of another worker
            if size is None:
                raise StoreError(f"{remote.name(key)}: another object is there after the write; compile again")
            return size
        finally:
            room.give(encoded.num_bytes)


class _Room:
    """Memory for `most` bytes; one object that takes more has it alone."""

    def __init__(self, most: int) -> None:
        self._most, self._taken, self._changed = most, 0, Condition()

    def take(self, count: int) -> None:
        """Wait until there is room for so many bytes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + count <= self._most)
            self._taken += count

    def give(self, count: int) -> None:
        with self._changed:
            self._taken -= count
            self._changed.notify_all()


def _rows(
    document: SourceDocument, parts: Sequence[tuple[str, Chunk]] | str, results: Mapping[str, int | PicError],
    new: set[str], seconds: float,
) -> list[ManifestRow]:  # fmt: skip
    """The rows of a document. `new`: the keys of objects that were computed now, and have no row yet."""
    if isinstance(parts, str):
        return [ManifestRow.failed(document.id, parts, document.num_bytes, seconds)]
    rows = []
    for number, (key, chunk) in enumerate(parts):
        result, is_first = results[key], number == 0
        size, error = (None, str(result)) if isinstance(result, PicError) else (result, None)
        rows.append(
            ManifestRow(
                document.id, number, key, len(chunk), size, error, error is None and key in new,
                is_first, seconds * is_first, document.num_bytes * is_first,
            )
        )  # fmt: skip
        new.discard(key)  # once, if documents are equal
    return rows


def _tried(function: Callable[[], T]) -> T | PicError:
    try:
        return function()
    except PicError as error:
        return error
