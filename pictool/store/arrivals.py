"""The objects that a process is fetching from a remote, and the threads that do it. How one comes is `arrival.py`."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pictool.errors import PicError, RemoteError, UnreadableObjectError
from pictool.store.arrival import BLOCK, Arrival, Arriving
from pictool.store.entries import object_path
from pictool.store.files import Publish
from pictool.store.remote import Remote

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
