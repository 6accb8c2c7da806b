"""Objects that are fetched from a remote: read while they are fetched, moved into the store once they are whole.

    remote --- ranges, several at a time ---> sparse temp file in tmp/ --- every checksum holds ---> objects/
                                                     |
                                           readers, each waiting for the blocks that it needs next

The first blocks of all objects are fetched first, then what follows, in order. A reader that needs a block which no
thread fetches yet fetches it itself. Blocks that no reader needs are fetched in the background, so that the next link
finds the whole object here; a process ends when all is fetched. One that is killed leaves a temp file, which the next
gc removes.
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

from pictool.errors import ForeignObjectError, ObjectError, PicError, RemoteError, UnreadableObjectError
from pictool.store.entries import object_path
from pictool.store.files import Publish, atomic_write
from pictool.store.objects.format import ObjectFile
from pictool.store.objects.header import HeaderError, header_bytes, stated_size
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Signed, write_sidecar

BLOCK = 1 << 20  # bytes of a request
CONNECTIONS = 8
_SKIP_S = 60.0  # for so long an object that was damaged, or could not be fetched, is not requested again
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
    """One object that is being fetched: a temp file that is filled block by block, checked, and moved into the store.

    Its readers, and the threads that fetch its blocks, hold references; who releases the last one has to `finish`.
    """

    def __init__(self, remote: Remote, key: str, destination: Destination) -> None:
        self.key, self.name = key, remote.name(key)
        self.finished: Future[None] = Future()  # done when the object is in the store, or discarded (with the error)
        self.error: PicError | None = None
        self.is_reported = False  # whether somebody has received the error
        self._has_prefetch_reference = True  # held since the beginning, until somebody opens the object
        self._remote, self._max_bytes = remote, destination.max_bytes
        self._lock, self._num_references, self._is_finishing = threading.Lock(), 1, False
        self._resources = ExitStack()
        self.signatures = b""  # that are kept with the object
        destination.ensure_store()
        self._target, self._temp_dir = target, temp_dir = object_path(destination.root, key), destination.root / "tmp"
        self._file = self._resources.enter_context(atomic_write(target, temp_dir, destination.publish))
        self.path = Path(self._file.name)
        self.num_bytes = 0
        self._blocks: list[Future[None] | None] = []  # None: no thread fetches it yet

    def start(self, first: bytes) -> None:
        """Set the size of the temp file, and write the object's first bytes to it.

        Raises:
            RemoteError: not an object, or larger than the room for it.
        """
        size = self._size_in_header(first)
        room = self._room()
        if size > room:
            raise RemoteError(f"{self.name}: takes {size:,d} bytes, but {room:,d} have room here; allow more", self.key)
        with self._writing():
            os.ftruncate(self._file.fileno(), size)
        self.num_bytes, self._blocks = size, [None] * -(-size // BLOCK)
        self._write(0, first[:size])
        for index in range(len(self._blocks)):
            if min((index + 1) * BLOCK, size) <= len(first):
                self._blocks[index] = _done()

    def _room(self) -> int:
        """Bytes that an object may take here."""
        disk = os.statvfs(self.path.parent)
        room = disk.f_bavail * disk.f_frsize
        return room if self._max_bytes is None else min(room, self._max_bytes)

    def _size_in_header(self, first: bytes) -> int:
        """The bytes of the whole object, as its header describes it."""
        try:
            length = header_bytes(first)
            if len(first) < length:
                first += self._remote.read(self.key, len(first), length) or b""
            return stated_size(first)
        except HeaderError as error:
            raise RemoteError(f"{self.name}: {error}; push it again", self.key) from error

    def missing_blocks(self) -> list[int]:
        """The blocks that no thread fetches yet."""
        return [index for index, block in enumerate(self._blocks) if block is None]

    def require(self, start: int, end: int) -> None:
        """Wait until bytes [start, end) are here. Raises RemoteError."""
        for index in range(start // BLOCK, -(-min(end, self.num_bytes) // BLOCK)):
            self.fetch_block(index)

    def fetch_block(self, index: int) -> None:
        """Fetch a block, or wait until the thread that fetches it has. Raises RemoteError."""
        claimed: Future[None] | None = None
        try:
            with self._lock:
                block = self._blocks[index]
                if block is None:  # known to be claimed here before it can be seen, lest an interrupt leave it so
                    claimed = self._blocks[index] = block = Future()
            if claimed is not None:
                self._read_block(index)
                claimed.set_result(None)
        except BaseException as error:
            problem = error if isinstance(error, PicError) else self._given_up()
            self.fail(problem)
            if claimed is not None and not claimed.done():
                claimed.set_exception(problem)
            raise
        block.result()

    def _read_block(self, index: int) -> None:
        if self.error is not None:
            raise self.error
        start, end = index * BLOCK, min((index + 1) * BLOCK, self.num_bytes)
        data = self._remote.read(self.key, start, end)
        if data is None:
            raise self._removed()
        self._write(start, data)

    def fetch_whole(self) -> None:
        """Fetch the object in one request, of a server that ignores ranges; every block is here once its bytes are."""
        with self._lock:
            claimed = {i: Future[None]() for i, block in enumerate(self._blocks) if block is None}
            for index, future in claimed.items():
                self._blocks[index] = future

        def write(offset: int, data: bytes) -> None:
            if self.error is not None:
                raise self.error
            self._write(offset, data)
            end = offset + len(data)
            for index in range(offset // BLOCK, -(-end // BLOCK)):
                future = claimed.get(index)
                if future is not None and not future.done() and end >= min((index + 1) * BLOCK, self.num_bytes):
                    future.set_result(None)

        try:
            if self._remote.read_all(self.key, self.num_bytes, write) is None:
                raise self._removed()
        except BaseException as error:
            problem = error if isinstance(error, PicError) else self._given_up()
            self.fail(problem)
            for future in claimed.values():
                if not future.done():
                    future.set_exception(problem)
            raise

    def _given_up(self) -> RemoteError:
        return RemoteError(f"{self.name}: was given up", self.key)

    def _removed(self) -> RemoteError:
        return RemoteError(f"{self.name}: was removed while it was being fetched; run the command again", self.key)

    def _write(self, offset: int, data: bytes) -> None:
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
                f"{self.name}: cannot be kept in {self.path.parent} ({error.strerror}); see what room it has", self.key
            ) from error

    def fail(self, error: PicError) -> None:
        """Keep the object out of the store. The first error stays."""
        self.error = self.error or error

    def acquire(self) -> bool:
        """Take a reference; False if it is finished. While it is being finished it can still be read."""
        with self._lock:
            self._num_references += not self.finished.done()
            return not self.finished.done()

    def take_prefetch_reference(self) -> bool:
        """True once: the caller then has to release the reference that is held since the beginning."""
        with self._lock:
            had_reference, self._has_prefetch_reference = self._has_prefetch_reference, False
        return had_reference

    def release(self) -> bool:
        """Give a reference back; True if it was the last: the caller then has to `finish`."""
        with self._lock:
            self._num_references -= 1
            return self._num_references == 0

    def finish(self) -> bool:
        """Check every part and move the object into the store, or discard it. False if somebody took a reference."""
        with self._lock:
            if self._num_references or self._is_finishing:
                return False
            self._is_finishing = True
        try:
            self._publish()
        except PicError as error:
            self.fail(error)
            self._discard(error)
        except BaseException as error:
            self._discard(error)
            self.finished.set_exception(error)
            raise
        if self.error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(self.error)
        return True

    def _publish(self) -> None:
        if self.error is not None:
            raise self.error
        try:
            with ObjectFile(self.path, self.name) as file:
                file.verify()
                file.require_key(self.key)
                if self.signatures:
                    write_sidecar(self._target, self.signatures, Signed.of_object(file).digest, self._temp_dir)
        except ObjectError as error:
            raise RemoteError(str(error), self.key) from error
        self._resources.close()

    def _discard(self, error: BaseException) -> None:
        with suppress(PicError):  # `error` again, or what atomic_write makes of it
            self._resources.__exit__(type(error), error, error.__traceback__)


class PartialObjectFile(ObjectFile):
    """An object that is read while it is fetched. Any problem with it is a RemoteError, and keeps it from the store."""

    def __init__(self, fetch: ObjectFetch, release: Callable[[ObjectFetch], None]) -> None:
        self._fetch, self._release, self._is_released = fetch, release, False
        try:
            super().__init__(fetch.path, fetch.name)
        except ForeignObjectError as error:
            remote_error = self._fail_fetch(str(error))
            self._release_once()
            raise remote_error from error
        except BaseException:  # among them UnreadableObjectError: it was just moved into the store
            self._release_once()
            raise
        try:
            self.require_key(fetch.key)
            if self.meta.parent is not None:
                raise self._fail("is a block of a prefix chain, no document's object; push it again")
        except BaseException:
            self.close()
            raise

    @property
    def fetch(self) -> ObjectFetch:
        return self._fetch

    def close(self) -> None:
        super().close()
        self._release_once()

    def _release_once(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._release(self._fetch)

    def _read(self, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        try:
            self._fetch.require(offset, offset + count)
        except PicError:
            self._fetch.is_reported = True
            raise
        return super()._read(offset, count, into)

    def _fail(self, why: str) -> ObjectError:
        return self._fail_fetch(f"{self.name}: {why}")

    def _fail_fetch(self, message: str) -> RemoteError:
        error = RemoteError(message, self._fetch.key)
        self._fetch.fail(error)
        self._fetch.is_reported = True
        return error


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Fetcher:
    """Fetches objects by key, in threads of its own. An object that several callers request at once is fetched once.

    `on_lost` is called with a message for an object that could not be moved into the store, if nobody received the
    error.
    """

    def __init__(self, remote: Remote, destination: Destination, on_lost: Callable[[str], None]) -> None:
        self._remote, self._destination, self._on_lost = remote, destination, on_lost
        self._started: dict[str, Future[ObjectFetch | None]] = {}
        self._unfinished: set[ObjectFetch] = set()
        self._skipped_until: dict[str, float] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(CONNECTIONS, "pic-remote")
        self._tasks: queue.PriorityQueue[tuple[float, int, Callable[[], None]]] = queue.PriorityQueue()
        self._task_numbers = itertools.count()

    def prefetch(self, key: str) -> Future[ObjectFetch | None]:
        """Start to fetch an object; it is moved into the store once it was opened, and closed.

        The result is None if the remote does not have it, or it is being skipped.
        """
        with self._lock:
            future = self._started.get(key)
            if future is not None:
                return future
            future = Future()
            if time.monotonic() < self._skipped_until.get(key, 0.0):
                future.set_result(None)
                return future
            self._started[key] = future
        self._submit(_FIRST, partial(self._start, key, future))
        return future

    def open(self, key: str) -> PartialObjectFile | None:
        """Open an object while it is fetched; None if the remote does not have it, or it is in the store by now.

        Raises:
            PicError: it cannot be fetched, is damaged, or is another object.
        """
        future = self.prefetch(key)
        try:
            fetch = future.result()
        except BaseException:
            self._forget(key, future)
            raise
        if fetch is None:
            self._forget(key, future)
            return None
        if fetch.acquire():
            self._release_prefetch(fetch)
            with suppress(UnreadableObjectError):
                return PartialObjectFile(fetch, self._release)
        fetch.finished.result()
        return None

    def fetch(self, key: str) -> None:
        """Fetch an object into the store, if the remote has it. Raises as `open` does, and StoreError."""
        file = self.open(key)
        if file is not None:
            file.fetch.is_reported = True
            file.close()
            file.fetch.finished.result()

    def skip(self, key: str) -> None:
        """Do not request this object for a while."""
        with self._lock:
            self._skipped_until[key] = time.monotonic() + _SKIP_S
            self._started.pop(key, None)

    def drain(self) -> None:
        """Wait until every started object is in the store, or discarded. Readers must have been closed."""
        while True:
            with self._lock:
                started, unfinished = dict(self._started), set(self._unfinished)
            if not started and not unfinished:
                return
            for key, future in started.items():
                if future.exception() or future.result() is None:
                    self._forget(key, future)
            for fetch in unfinished:
                self._release_prefetch(fetch)
            wait([fetch.finished for fetch in unfinished])

    def stop(self) -> None:
        """Let the threads end; a task that comes later is run by who submits it. It is not waited for.

        A pool wakes the threads that it knows at the end of the process, and not one that was being started when an
        interrupt came.
        """
        self._threads.shutdown(wait=False)

    def _start(self, key: str, future: Future[ObjectFetch | None]) -> None:
        fetch = None
        try:
            answer = self._remote.read_first(key, BLOCK)
            if answer is not None:
                fetch = ObjectFetch(self._remote, key, self._destination)
                with self._lock:
                    self._unfinished.add(fetch)
                if not self._is_admitted(fetch, answer[0]):  # as good as absent
                    fetch.fail(RemoteError(f"{fetch.name}: no trusted key has signed it", key))
                    fetch.is_reported = True
                    self._release_prefetch(fetch)
                    fetch = None
                else:
                    self._fetch_rest(fetch, answer[1])
            future.set_result(fetch)
        except BaseException as error:
            if fetch is not None:
                fetch.fail(RemoteError(str(error), key))
                fetch.is_reported = True  # by the future
                self._release_prefetch(fetch)
            future.set_exception(error)
            if not isinstance(error, PicError):
                raise

    def _is_admitted(self, fetch: ObjectFetch, first: bytes) -> bool:
        """Check the header in the first block, and who signed it."""
        fetch.start(first)
        if self._destination.admits is None:
            return True
        fetch.signatures = self._remote.read_signatures(fetch.key)
        fetch.acquire()
        with PartialObjectFile(fetch, self._release) as file:
            return self._destination.admits(file, fetch.signatures)

    def _fetch_rest(self, fetch: ObjectFetch, has_ranges: bool) -> None:
        """Check the header in the first block, and submit the other blocks."""
        missing = fetch.missing_blocks()
        if missing and not has_ranges:
            fetch.acquire()
            self._submit(_FIRST, partial(self._fetch_whole, fetch))
        fetch.acquire()
        PartialObjectFile(fetch, self._release).close()
        for index in missing if has_ranges else ():
            fetch.acquire()
            self._submit(index / len(missing), partial(self._fetch_block, fetch, index))

    def _fetch_whole(self, fetch: ObjectFetch) -> None:
        try:
            fetch.fetch_whole()
        except PicError:
            pass  # as in `_fetch_block`
        finally:
            self._release(fetch)

    def _fetch_block(self, fetch: ObjectFetch, index: int) -> None:
        try:
            fetch.fetch_block(index)
        except PicError:
            pass  # the readers receive it, or `on_lost` reports it
        finally:
            self._release(fetch)

    def _release_prefetch(self, fetch: ObjectFetch) -> None:
        if fetch.take_prefetch_reference():
            self._release(fetch)

    def _release(self, fetch: ObjectFetch) -> None:
        if fetch.release():
            self._submit(_LAST, partial(self._finish, fetch))

    def _finish(self, fetch: ObjectFetch) -> None:
        is_finished = True
        try:
            is_finished = fetch.finish()  # False if somebody opened it again
            if is_finished and fetch.error is not None and not fetch.is_reported:
                self._on_lost(f"{fetch.error}; it was not taken into the store")
        finally:
            if is_finished:
                self._forget_finished(fetch)

    def _forget_finished(self, fetch: ObjectFetch) -> None:
        with self._lock:
            future = self._started.get(fetch.key)
            if future is not None and future.done() and not future.exception() and future.result() is fetch:
                del self._started[fetch.key]
            self._unfinished.discard(fetch)

    def _forget(self, key: str, future: Future[ObjectFetch | None]) -> None:
        with self._lock:
            if self._started.get(key) is future:
                del self._started[key]

    def _submit(self, priority: float, task: Callable[[], None]) -> None:
        """Let a thread run a task: the least number first, then in the order of submission."""
        self._tasks.put((priority, next(self._task_numbers), task))
        try:
            self._threads.submit(self._run_next)
        except RuntimeError:  # the process is ending, and its threads accept no more tasks: this one runs it
            self._run_next()

    def _run_next(self) -> None:
        _, _, task = self._tasks.get_nowait()
        task()
