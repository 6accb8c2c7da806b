"""What a worker of a bulk compile does: batches of documents to objects at the remote. One model for its lifetime.

Knows nothing of Ray: it is called with documents, and returns rows of the manifest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from pictool.cluster.loading import load_same_model
from pictool.cluster.manifest import Row
from pictool.cluster.sources import Document
from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import Compiled, compile_chunks, object_key
from pictool.core import Chunk, CompileOptions
from pictool.errors import InputError, PicError, StoreError
from pictool.store.format import CompiledChunk
from pictool.store.remote import Remote
from pictool.store.scratch import scratch_directory
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_CONNECTIONS = 8  # to the remote, of a worker
_MOST_UNSENT = 16  # objects in the scratch directory; computing waits for a slow remote


@dataclass(frozen=True)
class BulkSpec:
    """How documents are compiled, and where to: the same for all workers.

    Fields:
        fingerprints: of the driver's model and tokenizer; None: not compared.
        threads: of each worker's computation.
        force: compute also what the remote has.
        version: of the package, which all must have; none is not compared.
    """

    remote: Remote
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    salt: str = field(default="", repr=False)
    options: CompileOptions = CompileOptions()
    chunk_tokens: int | None = None
    overlap: int = 0
    force: bool = False
    fingerprints: tuple[str, str] | None = None
    threads: int = 1
    version: str = ""


class Worker:
    """Compiles batches of documents. Creating one costs nothing; the first batch opens the model."""

    def __init__(self, spec: BulkSpec) -> None:
        self._spec = spec
        self._resources = ExitStack()

    @cached_property
    def model(self) -> Model:
        """Raises InputError or ModelError: it is not what the driver has."""
        return load_same_model(self._spec)

    @cached_property
    def _scratch(self) -> _Scratch:
        """Where objects are until they are at the remote."""
        return _Scratch(self._resources.enter_context(scratch_directory(tempfile.gettempdir())))

    @cached_property
    def _sending(self) -> ThreadPoolExecutor:
        return self._resources.enter_context(ThreadPoolExecutor(_CONNECTIONS, "pic-send"))

    def close(self) -> None:
        """End its threads, and remove its directory."""
        self._resources.close()

    def compile(self, documents: Sequence[Document]) -> list[Row]:
        """Compile documents; what is wrong with one is a row with its error.

        Raises:
            PicError: the model cannot be opened, so that nothing can be compiled.
        """
        started, model = time.perf_counter(), self.model
        cut = [self._cut(model, document) for document in documents]
        chunks = {
            object_key(model, chunk, self._spec.options): chunk
            for parts in cut if not isinstance(parts, str) for chunk in parts
        }  # fmt: skip
        there = {} if self._spec.force else self._present(list(chunks))
        made = self._compile(model, {key: chunk for key, chunk in chunks.items() if key not in there})
        seconds = (time.perf_counter() - started) / len(documents)
        rows, results, new = [], {**there, **made}, set(made)
        for document, parts in zip(documents, cut, strict=True):
            rows += self._rows(model, document, parts, results, new, seconds)
        return rows

    def _cut(self, model: Model, document: Document) -> list[Chunk] | str:
        """The chunks of a document, or what is wrong with it."""
        if document.text is None:
            return document.error or "has no text"
        try:
            parts = make_chunks(model, document.text, document.id, self._spec.chunk_tokens, self._spec.overlap)
            room = model.max_positions - self._spec.options.sinks
            if too_long := [part for part in parts if len(part) > room]:
                return f"{too_long[0].source}: {len(too_long[0])} tokens, but the model has {room} positions for it"
        except InputError as error:
            return str(error)
        return parts

    def _present(self, keys: Sequence[str]) -> dict[str, int | PicError]:
        """Bytes of the objects that the remote has, or why it cannot tell."""

        def find(key: str) -> int | PicError | None:
            try:
                return self._spec.remote.whole_bytes(key)
            except PicError as error:
                return error

        found = zip(keys, self._sending.map(find, keys), strict=True)
        return {key: size for key, size in found if size is not None}

    def _compile(self, model: Model, missing: Mapping[str, Chunk]) -> dict[str, int | PicError]:
        """Compile chunks, and send each object to the remote while the next is computed: its bytes, or its error."""
        if not missing:
            return {}
        _ = model.stack  # weights that cannot be loaded are no document's problem
        sent: dict[str, Future[int]] = {}
        room = BoundedSemaphore(_MOST_UNSENT)

        def send(done: Compiled) -> None:
            room.acquire()
            sent[done.key] = future = self._sending.submit(self._send, done.key, done.path)
            future.add_done_callback(lambda _: room.release())

        failed: dict[str, PicError] = {}
        try:
            compile_chunks(model, self._scratch, missing.values(), self._spec.options, on_done=send)
        except PicError:  # of one of them: each by itself
            for key, chunk in missing.items():
                try:
                    if key not in sent:
                        compile_chunks(model, self._scratch, [chunk], self._spec.options, on_done=send)
                except PicError as error:
                    failed[key] = error
        return {key: failed[key] if key in failed else _result(sent[key]) for key in missing}

    def _send(self, key: str, path: Path) -> int:
        """Write an object to the remote, see that it is there, and remove it here; its bytes."""
        try:
            with self._scratch.peek_local(key) as file:
                self._spec.remote.write(key, path)
                if not self._spec.remote.has_same(file):
                    raise StoreError(f"{self._spec.remote.name(key)}: is another object after it was written")
                return file.num_bytes
        finally:
            path.unlink(missing_ok=True)

    def _rows(
        self, model: Model, document: Document, parts: list[Chunk] | str, results: Mapping[str, int | PicError],
        new: set[str], seconds: float,
    ) -> list[Row]:  # fmt: skip
        if isinstance(parts, str):
            return [Row(document.id, None, None, None, None, parts, False, True, seconds, document.num_bytes)]
        rows = []
        for number, chunk in enumerate(parts):
            key = object_key(model, chunk, self._spec.options)
            result, is_first = results[key], number == 0
            size, error = (None, str(result)) if isinstance(result, PicError) else (result, None)
            rows.append(
                Row(
                    document.id, number, key, len(chunk), size, error, error is None and key in new, is_first,
                    seconds * is_first, document.num_bytes * is_first,
                )
            )  # fmt: skip
            new.discard(key)  # once, if documents are equal
        return rows


class _Scratch(Store):
    """A store that keeps nothing: no write waits for the disk."""

    def put(self, chunk: CompiledChunk, used_ns: int | None = None, durable: bool = False) -> Path:
        return super().put(chunk, used_ns, durable)


def _result(future: Future[int]) -> int | PicError:
    try:
        return future.result()
    except PicError as error:
        return error
