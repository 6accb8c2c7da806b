"""Objects on their way from a remote: read while they come, taken into the store once they are whole.

    remote --- ranges, several at a time ---> sparse temp file in tmp/ --- every checksum holds ---> objects/
                                                     |
                                           readers, each waiting for the blocks that it needs next

What is wanted first is fetched first: the beginnings of all objects, then what follows. A reader that needs a block
which nobody fetches yet fetches it itself. What no reader needs comes too, behind the link, so that the next one has it
here; a process ends when all has come. One that is killed leaves a temp file, which the next gc removes.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pictool.errors import ForeignObjectError, ObjectError, PicError, RemoteError
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
