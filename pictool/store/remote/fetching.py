"""Objects that are fetched from a remote: read while they are fetched, moved into the store once they are whole.

    remote --- ranges, several at a time ---> sparse temp file in tmp/ --- every checksum holds ---> objects/
                                                     |
                                           readers, each waiting for the blocks that it needs next

The first blocks of all objects are fetched first, then what follows, in order. Blocks that no reader needs are fetched
in the background, so that the next link finds the whole object here; a process ends when all is fetched. One that is
killed leaves a temp file, which the next gc removes. Of a server that ignores ranges, an object is read as a whole
before anybody can open it.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pictool.errors import ForeignObjectError, ObjectError, PicError, RemoteError, UnreadableObjectError
from pictool.store.entries import object_path
from pictool.store.files import Publish, atomic_write
from pictool.store.objects.format import ObjectFile
from pictool.store.objects.header import HeaderError, stated_size
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Signed, write_sidecar

BLOCK = 1 << 20  # bytes of a request
CONNECTIONS = 8
_SKIP_S = 60.0  # for so long an object that was damaged, or could not be fetched, is not requested again
T = TypeVar("T")
_FIRST, _LAST = -1.0, 2.0  # priorities: first blocks; other blocks by their relative position (0 … 1); finishing


@dataclass(frozen=True)
class Destination:
    """The store that objects are fetched to: its directory, its budget, and how it makes a whole object visible.

    `ensure_store` is called before anything is written. `admits` says, of an object and its signatures, whether it may
    be used; None: whoever signed it.
    """

    root: Path
    max_bytes: int | None
    publish: Publish
    ensure_store: Callable[[], None] = lambda: None
    admits: Callable[[ObjectFile, bytes], bool] | None = None


class ObjectFetch:
    """One object that is being fetched: a temp file, filled block by block, checked, and moved into the store."""

    def __init__(self, remote: Remote, key: str, destination: Destination) -> None:
        self.key, self.name = key, remote.name(key)
        self.blocks = dict[int, Future[None]]()  # of what follows the first bytes
        self.finished: Future[None] = Future()  # done when the object is in the store, or discarded (with the error)
        self.error: PicError | None = None  # keeps the object out of the store
        self.is_reported = False  # whether somebody has received the error
        self.is_finishing = False
        self.num_bytes = 0
        self._remote, self._max_bytes, self._admits = remote, destination.max_bytes, destination.admits
        self._num_here, self._signatures, self._resources = 0, b"", ExitStack()
        destination.ensure_store()
        self._target, self._temp_dir = object_path(destination.root, key), destination.root / "tmp"
        temp_file = atomic_write(self._target, self._temp_dir, destination.publish)
        self._file = self._resources.enter_context(temp_file)
        self.path = Path(self._file.name)

    def start(self, first: bytes) -> bool:
        """Write the object's first bytes, and check its header; False if no trusted key has signed it.

        Raises:
            RemoteError: not this object, or larger than the room for it.
        """
        try:
            first = self._remote.with_header(self.key, first)
            self.num_bytes, room = stated_size(first), self._room()
        except HeaderError as error:
            raise RemoteError(f"{self.name}: {error}; push it again", self.key) from error
        if self.num_bytes > room:
            raise RemoteError(
                f"{self.name}: needs {self.num_bytes:,d} bytes, but {room:,d} are available; free space or raise "
                "max_size",
                self.key,
            )
        with self._writing():
            os.ftruncate(self._file.fileno(), self.num_bytes)
        self._num_here = min(len(first), self.num_bytes)
        self.write(0, first[: self.num_bytes])
        with PartialObjectFile(self) as file:
            if file.meta.parent is not None:
                raise RemoteError(f"{self.name}: is a block of a prefix chain, not a document's object; push it again")
            if self._admits is None:
                return True
            self._signatures = self._remote.read_signatures(self.key)
            return self._admits(file, self._signatures)

    def _room(self) -> int:
        """Bytes that an object may take here."""
        disk = os.statvfs(self.path.parent)
        room = disk.f_bavail * disk.f_frsize
        return room if self._max_bytes is None else min(room, self._max_bytes)

    def missing_blocks(self) -> list[int]:
        """The blocks that the first bytes do not have as a whole."""
        count = -(-self.num_bytes // BLOCK)
        return [i for i in range(count) if min((i + 1) * BLOCK, self.num_bytes) > self._num_here]

    def require(self, start: int, end: int) -> None:
        """Wait until bytes [start, end) are here. Raises RemoteError."""
        if end > self._num_here:
            for index in range(start // BLOCK, -(-min(end, self.num_bytes) // BLOCK)):
                if index in self.blocks:
                    self.blocks[index].result()

    def read_block(self, index: int) -> None:
        """Fetch a block. Raises RemoteError; then it is the error of the whole object."""
        try:
            if self.error is not None:
                raise self.error
            start, end = index * BLOCK, min((index + 1) * BLOCK, self.num_bytes)
            data = self._remote.read(self.key, start, end)
            if data is None:
                raise self._removed()
            self.write(start, data)
        except PicError as error:
            self.error = self.error or error
            raise

    def read_whole(self) -> None:
        """Fetch the object in one request. Raises RemoteError."""
        if self._remote.read_all(self.key, self.num_bytes, self.write) is None:
            raise self._removed()
        self._num_here = self.num_bytes

    def _removed(self) -> RemoteError:
        return RemoteError(f"{self.name}: was removed while it was being fetched; run the command again", self.key)

    def write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        with self._writing():
            while view:
                num_written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[num_written:], offset + num_written

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RemoteError(
                f"{self.name}: cannot be written to {self.path.parent} ({error.strerror}); check its free space",
                self.key,
            ) from error

    def finish(self) -> None:
        """Check every part and move the object into the store, or discard it."""
        wait(self.blocks.values())
        try:
            with self._resources:
                if self.error is not None:
                    raise self.error
                self._verify()
            self.finished.set_result(None)
        except BaseException as error:
            self.finished.set_exception(error)
            if not isinstance(error, PicError):
                raise
            self.error = error

    def discard(self, error: BaseException) -> None:
        """Remove the temp file of an object that cannot be fetched."""
        with suppress(PicError):  # `error` again, or what atomic_write makes of it
            self._resources.__exit__(type(error), error, error.__traceback__)

    def _verify(self) -> None:
        try:
            with ObjectFile(self.path, self.name) as file:
                file.verify()
                file.require_key(self.key)
                if self._signatures:
                    write_sidecar(self._target, self._signatures, Signed.of_object(file).digest, self._temp_dir)
        except ObjectError as error:
            raise RemoteError(str(error), self.key) from error


class PartialObjectFile(ObjectFile):
    """An object that is read while it is fetched. Any problem with it is a RemoteError, and keeps it from the store.

    `on_close` is called when it is closed.
    """

    def __init__(self, fetch: ObjectFetch, on_close: Callable[[ObjectFetch], None] = lambda fetch: None) -> None:
        self.fetch, self._on_close = fetch, on_close
        try:
            super().__init__(fetch.path, fetch.name)
        except ForeignObjectError as error:
            raise self._refused(str(error)) from error

    def close(self) -> None:
        super().close()
        self._on_close(self.fetch)

    def _read(self, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        try:
            self.fetch.require(offset, offset + count)
        except PicError:
            self.fetch.is_reported = True
            raise
        return super()._read(offset, count, into)

    def _fail(self, why: str) -> ObjectError:
        return self._refused(f"{self.name}: {why}")

    def _refused(self, message: str) -> RemoteError:
        error = RemoteError(message, self.fetch.key)
        self.fetch.error, self.fetch.is_reported = self.fetch.error or error, True
        return error


class Fetcher:
    """Fetches objects by key, in threads of its own. An object that several callers request at once is fetched once.

    `on_lost` is called with a message for an object that could not be moved into the store, if nobody received the
    error.
    """

    def __init__(self, remote: Remote, destination: Destination, on_lost: Callable[[str], None]) -> None:
        self._remote, self._destination, self._on_lost = remote, destination, on_lost
        self._started: dict[str, Future[ObjectFetch | None]] = {}
        self._skipped_until: dict[str, float] = {}
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(CONNECTIONS, "pic-remote")
        self._tasks: queue.PriorityQueue[tuple[float, int, Callable[[], Any], Future[Any]]] = queue.PriorityQueue()
        self._task_numbers = itertools.count()

    def prefetch(self, key: str) -> Future[ObjectFetch | None]:
        """Start to fetch an object; it is moved into the store once it was opened, and closed.

        The result is None if the remote does not have it, or it is being skipped.
        """
        with self._lock:
            if key not in self._started:
                if time.monotonic() < self._skipped_until.get(key, 0.0):
                    return _done()
                self._started[key] = self._submit(_FIRST, partial(self._start, key))
            return self._started[key]

    def open(self, key: str) -> PartialObjectFile | None:
        """Open an object while it is fetched; None if the remote does not have it, or it is in the store by now.

        Raises:
            PicError: it cannot be fetched, is damaged, or is another object.
        """
        future, fetch = self.prefetch(key), None
        try:
            fetch = future.result()
        finally:
            if fetch is None and future.done():
                self._forget(key)
        if fetch is None:
            return None
        try:
            file = PartialObjectFile(fetch, self._finish_later)
        except UnreadableObjectError:  # it is in the store by now, or discarded
            self._finish_later(fetch)
            fetch.finished.result()
            return None
        try:
            file.require_key(key)
        except BaseException:
            file.close()
            raise
        return file

    def fetch(self, key: str) -> None:
        """Fetch an object into the store, if the remote has it. Raises as `open` does, and StoreError."""
        file = self.open(key)
        if file is not None:
            file.fetch.is_reported = True
            file.close()
            file.fetch.finished.result()

    def skip(self, key: str) -> None:
        """Do not request this object for a while."""
        self._skipped_until[key] = time.monotonic() + _SKIP_S
        self._forget(key)

    def drain(self) -> None:
        """Wait until every started object is in the store, or discarded. Readers must have been closed."""
        self._tasks.join()
        for future in list(self._started.values()):
            if future.exception() is None and (fetch := future.result()) is not None:
                self._finish_later(fetch)
        self._tasks.join()
        self._started.clear()

    def stop(self) -> None:
        """Let the threads end; a task that comes later is run by who submits it. It is not waited for.

        A pool wakes the threads that it knows at the end of the process, and not one that was being started when an
        interrupt came.
        """
        self._threads.shutdown(wait=False)

    def _start(self, key: str) -> ObjectFetch | None:
        """Begin to fetch an object, and submit its blocks; None if there is none that may be used."""
        answer = self._remote.read_first(key, BLOCK)
        if answer is None:
            return None
        first, has_ranges = answer
        fetch = ObjectFetch(self._remote, key, self._destination)
        try:
            is_admitted = fetch.start(first)
            if is_admitted and not has_ranges:
                fetch.read_whole()
        except BaseException as error:
            fetch.discard(error)
            raise
        if not is_admitted:  # as good as absent
            fetch.discard(RemoteError(f"{fetch.name}: not signed by a trusted key", key))
            return None
        missing = fetch.missing_blocks()
        for index in missing:
            fetch.blocks[index] = self._submit(index / len(missing), partial(fetch.read_block, index))
        return fetch

    def _finish_later(self, fetch: ObjectFetch) -> None:
        with self._lock:
            if not fetch.is_finishing:
                fetch.is_finishing = True
                self._submit(_LAST, partial(self._finish, fetch))

    def _finish(self, fetch: ObjectFetch) -> None:
        try:
            fetch.finish()
            if fetch.error is not None and not fetch.is_reported:
                self._on_lost(f"{fetch.error}; it was not added to the store")
        finally:
            self._forget(fetch.key)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._started.pop(key, None)

    def _submit(self, priority: float, task: Callable[[], T]) -> Future[T]:
        """Let a thread run a task: the least number first, then in the order of submission."""
        future: Future[T] = Future()
        self._tasks.put((priority, next(self._task_numbers), task, future))
        try:
            self._threads.submit(self._run_next)
        except RuntimeError:  # the process is ending, and its threads accept no more tasks: this one runs it
            self._run_next()
        return future

    def _run_next(self) -> None:
        _, _, task, future = self._tasks.get_nowait()
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._tasks.task_done()


def _done() -> Future[ObjectFetch | None]:
    future: Future[ObjectFetch | None] = Future()
    future.set_result(None)
    return future
