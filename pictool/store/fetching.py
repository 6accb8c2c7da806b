"""Objects on their way from a remote: read while they come, taken into the store once they are whole.

    remote --- ranges, several at a time ---> sparse temp file in tmp/ --- every checksum holds ---> objects/
                                                     |
                                           readers, each waiting for the blocks that it needs next

What is wanted first is fetched first: the beginnings of all objects, then what follows. A reader that needs a block
which nobody fetches yet fetches it itself. What no reader needs comes too, behind the link, so that the next one has it
here; a process ends when all has come. One that is killed leaves a temp file, which the next gc removes.

The objects that a process is fetching from a remote, and the threads that do it. How one comes is `arrival.py`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import struct
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
from pictool.store.format import ObjectFile
from pictool.store.remote import STOP, Remote

BLOCK = 1 << 20  # bytes of a request
_MAX_HEADER = 100_000_000


class Arrival:
    """One object: a temp file that is filled block by block. Held by all who read or fetch; settled by the last."""

    def __init__(self, remote: Remote, key: str, target: Path, temp_dir: Path, publish: Publish) -> None:
        self.key, self.name = key, remote.name(key)
        self.settled: Future[None] = Future()
        self.error: PicError | None = None
        self.is_told = False  # whether somebody has seen the error
        self._is_expected = True  # who began it holds it until somebody opens it
        self._remote, self._lock, self._holders = remote, threading.Lock(), 1
        self._is_settling = False
        self._resources = ExitStack()
        self._file = self._resources.enter_context(atomic_write(target, temp_dir, publish))
        self.path = Path(self._file.name)
        self.num_bytes = 0
        self._blocks: list[Future[None] | None] = []

    def begin(self, first: bytes, max_bytes: int | None) -> None:
        """Give it its size, and the bytes that came first.

        Raises:
            RemoteError: not an object, or larger than what fits here.
        """
        size = self._described_size(first)
        room = os.statvfs(self.path.parent)
        if size > (most := room.f_bavail * room.f_frsize) or (max_bytes is not None and size > max_bytes):
            most = most if max_bytes is None else min(most, max_bytes)
            raise RemoteError(f"{self.name}: takes {size:,d} bytes, but {most:,d} have room here; allow more", self.key)
        with self._writing():
            os.ftruncate(self._file.fileno(), size)
        self.num_bytes, self._blocks = size, [None] * -(-size // BLOCK)
        self._write(0, first[:size])
        for index in range(len(self._blocks)):
            if min((index + 1) * BLOCK, size) <= len(first):
                self._blocks[index] = _done()

    def _described_size(self, first: bytes) -> int:
        """The bytes of the whole object, as its header (which is not checked yet) describes it."""
        try:
            (length,) = struct.unpack_from("<Q", first)
            if length > _MAX_HEADER:
                raise ValueError
            if len(first) < 8 + length:
                first += self._remote.read(self.key, len(first), 8 + length) or b""
            header = json.loads(first[8 : 8 + length])
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
            return int(8 + length + max(ends))
        except (struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise RemoteError(
                f"{self.name}: not an object, or its header is damaged; push it again", self.key
            ) from error

    def missing(self) -> list[int]:
        """The blocks that nobody fetches yet."""
        return [index for index, block in enumerate(self._blocks) if block is None]

    def require(self, start: int, end: int) -> None:
        """Wait until bytes [start, end) are here. Raises RemoteError."""
        for index in range(start // BLOCK, -(-min(end, self.num_bytes) // BLOCK)):
            self.bring(index)

    def bring(self, index: int) -> None:
        """Fetch a block, or wait until another thread has. Raises RemoteError."""
        with self._lock:
            block, is_mine = self._blocks[index], self._blocks[index] is None
            if block is None:
                self._blocks[index] = block = Future()
        if is_mine:
            try:
                self._fetch(index)
                block.set_result(None)
            except PicError as error:
                self.fail(error)
                block.set_exception(error)
            except BaseException as error:
                self.fail(RemoteError(f"{self.name}: was given up", self.key))
                block.set_exception(error)
                raise
        block.result()

    def _fetch(self, index: int) -> None:
        if self.error is not None:
            raise self.error
        if STOP.is_set():
            raise RemoteError(f"{self.name}: was given up", self.key)
        start, end = index * BLOCK, min((index + 1) * BLOCK, self.num_bytes)
        data = self._remote.read(self.key, start, end)
        if data is None:
            raise RemoteError(f"{self.name}: was removed while it was being fetched; run the command again", self.key)
        self._write(start, data)

    def _write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        with self._writing():
            while view:
                done = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[done:], offset + done

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RemoteError(
                f"{self.name}: cannot be kept in {self.path.parent} ({error.strerror}); see what room it has", self.key
            ) from error

    def fail(self, error: PicError) -> None:
        """Nothing of it is taken into the store. The first reason stays."""
        self.error = self.error or error

    def hold(self) -> bool:
        """False if it is settled. While it is being settled it can still be read."""
        with self._lock:
            self._holders += not self.settled.done()
            return not self.settled.done()

    def end_expectation(self) -> bool:
        """True once: whoever gets it releases what the beginner held."""
        with self._lock:
            was_expected, self._is_expected = self._is_expected, False
        return was_expected

    def release(self) -> bool:
        """True if nobody holds it any more: it is to be settled."""
        with self._lock:
            self._holders -= 1
            return self._holders == 0

    def settle(self) -> bool:
        """Check every part of it and take it into the store; or drop it, if anything is wrong. False if it is held."""
        with self._lock:
            if self._holders or self._is_settling:
                return False
            self._is_settling = True
        try:
            self._publish()
        except PicError as error:
            self.fail(error)
            self._drop(error)
        except BaseException as error:
            self._drop(error)
            self.settled.set_exception(error)
            raise
        if self.error is None:
            self.settled.set_result(None)
        else:
            self.settled.set_exception(self.error)
        return True

    def _publish(self) -> None:
        if self.error is not None:
            raise self.error
        try:
            with ObjectFile(self.path, self.name) as file:
                file.verify()
                if file.meta.key != self.key:
                    raise ObjectError(f"{self.name}: {_another(file.meta.key)}")
        except ObjectError as error:
            raise RemoteError(str(error), self.key) from error
        self._resources.close()

    def _drop(self, error: BaseException) -> None:
        with suppress(PicError):  # as `error` is told, or one that it becomes
            self._resources.__exit__(type(error), error, error.__traceback__)


class Arriving(ObjectFile):
    """An object that is read while it arrives. What is wrong with it is a RemoteError, and keeps it from the store."""

    def __init__(self, arrival: Arrival, release: Callable[[Arrival], None]) -> None:
        self._arrival, self._release, self._is_released = arrival, release, False
        try:
            super().__init__(arrival.path, arrival.name)
        except ForeignObjectError as error:
            lost = self._lost(str(error))
            self._give_back()
            raise lost from error
        except BaseException:  # among them UnreadableObjectError: it was just taken into the store
            self._give_back()
            raise
        if self.meta.key != arrival.key:
            lost = self._lost(f"{self.name}: {_another(self.meta.key)}")
            self.close()
            raise lost

    @property
    def arrival(self) -> Arrival:
        return self._arrival

    def close(self) -> None:
        super().close()
        self._give_back()

    def _give_back(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._release(self._arrival)

    def _read(self, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        try:
            self._arrival.require(offset, offset + count)
        except PicError:
            self._arrival.is_told = True
            raise
        return super()._read(offset, count, into)

    def _fail(self, why: str) -> ObjectError:
        return self._lost(f"{self.name}: {why}")

    def _lost(self, message: str) -> RemoteError:
        error = RemoteError(message, self._arrival.key)
        self._arrival.fail(error)
        self._arrival.is_told = True
        return error


def _another(key: str) -> str:
    return f"holds the object {key[:12]}, not what its name says; push it again"


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


CONNECTIONS = 8
_REFUSED_S = 60.0  # for so long an object that was damaged, or could not be had, is not asked for again
_FIRST, _LAST = -1.0, 2.0  # ranks: beginnings; blocks by how far back in their object they stand; settling
Begun = Future[Arrival | None]


@dataclass(frozen=True)
class Place:
    """The store that objects come to: its directory, its budget, and how it makes a whole object visible."""

    root: Path
    max_bytes: int | None
    publish: Publish


class Arrivals:
    """Objects by key; what many want at once comes once.

    `on_lost` is told of an object that could not be taken into the store, if nobody else is.
    """

    def __init__(self, remote: Remote, place: Place, on_lost: Callable[[str], None]) -> None:
        self._remote, self._place, self._on_lost = remote, place, on_lost
        self._begun: dict[str, Begun] = {}
        self._live: set[Arrival] = set()  # not settled yet
        self._refused: dict[str, float] = {}
        self._lock = threading.Lock()
        self._threads, self._work = ThreadPoolExecutor(CONNECTIONS, "pic-remote"), _RankedWork()

    def expect(self, key: str) -> Begun:
        """Begin to fetch an object; it is taken into the store once it was opened, and closed.

        The result is None if the remote has it not, or it was refused just now.
        """
        with self._lock:
            future = self._begun.get(key)
            if future is not None:
                return future
            future = Future()
            if time.monotonic() < self._refused.get(key, 0.0):
                future.set_result(None)
                return future
            self._begun[key] = future
        self._submit(_FIRST, partial(self._begin, key, future))
        return future

    def open(self, key: str) -> Arriving | None:
        """Open an object that is fetched meanwhile; None if the remote has it not, or it is in the store by now.

        Raises:
            PicError: it cannot be had, is damaged, or is another object.
        """
        future = self.expect(key)
        try:
            arrival = future.result()
        except BaseException:
            self._forget(key, future)
            raise
        if arrival is None:
            self._forget(key, future)
            return None
        if arrival.hold():
            self._end_expectation(arrival)
            with suppress(UnreadableObjectError):
                return Arriving(arrival, self._release)
        arrival.settled.result()
        return None

    def bring(self, key: str) -> None:
        """Take an object into the store, if the remote has it. Raises as `open` does, and StoreError."""
        file = self.open(key)
        if file is not None:
            file.arrival.is_told = True
            file.close()
            file.arrival.settled.result()

    def refuse(self, key: str) -> None:
        """Do without the remote's object for a while."""
        with self._lock:
            self._refused[key] = time.monotonic() + _REFUSED_S
            self._begun.pop(key, None)

    def settle(self) -> None:
        """Wait until all that was begun is in the store, or lost. Readers must have been closed."""
        while True:
            with self._lock:
                begun, live = dict(self._begun), set(self._live)
            if not begun and not live:
                return
            for key, future in begun.items():
                if future.exception() or future.result() is None:
                    self._forget(key, future)
            for arrival in live:
                self._end_expectation(arrival)
            wait([arrival.settled for arrival in live])

    def _begin(self, key: str, future: Begun) -> None:
        arrival = None
        try:
            first = self._remote.read(key, 0, BLOCK, at_most=True)
            if first is not None:
                root = self._place.root
                arrival = Arrival(self._remote, key, object_path(root, key), root / "tmp", self._place.publish)
                with self._lock:
                    self._live.add(arrival)
                self._fill(arrival, first)
            future.set_result(arrival)
        except BaseException as error:
            if arrival is not None:
                arrival.fail(RemoteError(str(error), key))
                arrival.is_told = True  # to whoever asked
                self._end_expectation(arrival)
            future.set_exception(error)
            if not isinstance(error, PicError):
                raise

    def _fill(self, arrival: Arrival, first: bytes) -> None:
        """Check its header, and let what is missing be fetched."""
        arrival.begin(first, self._place.max_bytes)
        arrival.hold()
        Arriving(arrival, self._release).close()
        missing = arrival.missing()
        for index in missing:
            arrival.hold()
            self._submit(index / len(missing), partial(self._fetch, arrival, index))

    def _fetch(self, arrival: Arrival, index: int) -> None:
        try:
            arrival.bring(index)
        except PicError:
            pass  # it is told to the readers, or when the arrival is settled
        finally:
            self._release(arrival)

    def _end_expectation(self, arrival: Arrival) -> None:
        if arrival.end_expectation():
            self._release(arrival)

    def _release(self, arrival: Arrival) -> None:
        if arrival.release():
            self._submit(_LAST, partial(self._settle, arrival))

    def _settle(self, arrival: Arrival) -> None:
        is_settled = True
        try:
            is_settled = arrival.settle()  # else somebody opened it again
            if is_settled and arrival.error is not None and not arrival.is_told:
                self._on_lost(f"{arrival.error}; it was not taken into the store")
        finally:
            if is_settled:
                self._forget_settled(arrival)

    def _forget_settled(self, arrival: Arrival) -> None:
        with self._lock:
            future = self._begun.get(arrival.key)
            if future is not None and future.done() and not future.exception() and future.result() is arrival:
                del self._begun[arrival.key]
            self._live.discard(arrival)

    def _forget(self, key: str, future: Begun) -> None:
        with self._lock:
            if self._begun.get(key) is future:
                del self._begun[key]

    def _submit(self, rank: float, work: Callable[[], None]) -> None:
        self._work.push(rank, work)
        try:
            self._threads.submit(self._work.run_first)
        except RuntimeError:  # the process is ending, and its threads take no more: this one does it
            self._work.run_first()


class _RankedWork:
    """What is to be done, least rank first, then as it came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._lock = itertools.count(), threading.Lock()

    def push(self, rank: float, work: Callable[[], None]) -> None:
        with self._lock:
            heapq.heappush(self._heap, (rank, next(self._count), work))

    def run_first(self) -> None:
        with self._lock:
            _, _, work = heapq.heappop(self._heap)
        work()
