"""The thread that one engine runs on: requests take turns, a step each, and wait in a bounded queue that is fair."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger("pictool.serve")
_GIVEN_WAY_S = 0.02  # at most, to a round of steps


class QueueFullError(Exception):
    """There is no place left for a task of this tenant."""


class ClosedError(Exception):
    """The thread ended before the task did."""


@dataclass(eq=False)
class Task:
    """Work in steps. `steps` is called, and its iterator advanced, on the thread; `on_end` with the error, if any.

    A step that yields True ends a turn of the task: if others wait, it waits for its next turn as they do. It keeps its
    place meanwhile, so nothing of a long task is refused in the middle, and none has the thread to itself.
    """

    tenant: str
    steps: Callable[[Task], Iterator[bool | None]]
    on_end: Callable[[BaseException | None], None]
    is_cancelled: bool = False
    _running: Iterator[bool | None] | None = field(default=None, repr=False)
    _has_rest: bool = field(default=False, repr=False)

    @property
    def has_begun(self) -> bool:
        return self._running is not None


class OfTenant(Protocol):
    """What waits in a fair queue. `has_begun`: with its place work that is done would be lost."""

    tenant: str

    @property
    def has_begun(self) -> bool: ...


W = TypeVar("W", bound=OfTenant)


class FairQueue(Generic[W]):
    """Tasks of tenants: the next one is of the tenant with the fewest running, then of whom waited longest for a turn.

    At most `limit` tasks wait. Where all places are taken, a tenant that has fewer of them than another takes the last
    one of that; one of a task that has begun only if there is no other.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: OrderedDict[str, deque[W]] = OrderedDict()  # the tenant of the next turn first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, task: W) -> W | None:
        """Add a task; returns the one that lost its place for it, if any. Raises QueueFullError."""
        loser = None
        if len(self) >= self._limit:
            most = max(self._waiting.values(), key=len, default=deque[W]())
            if len(most) <= len(self._waiting.get(task.tenant, ())) + 1:
                raise QueueFullError
            loser = next((waiting for waiting in reversed(most) if not waiting.has_begun), most[-1])
            most.remove(loser)
        self.put_back(task)
        return loser

    def put_back(self, task: W) -> None:
        """Add a task that has a place already, as the last of its tenant's."""
        self._waiting.setdefault(task.tenant, deque()).append(task)

    def pop(self, running: Counter[str]) -> W:
        """The next task. `running` counts those of each tenant that run."""
        tenant = min(self._waiting, key=lambda name: running[name])  # of equals the first
        task = self._waiting[tenant].popleft()
        if self._waiting[tenant]:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        return task

    def drain(self) -> list[W]:
        """All tasks that wait; none does any more."""
        tasks = [task for waiting in self._waiting.values() for task in waiting]
        self._waiting.clear()
        return tasks

    def remove(self, task: W) -> bool:
        """Take a task out that still waits; False if it does not."""
        own = self._waiting.get(task.tenant, deque[W]())
        if task not in own:
            return False
        own.remove(task)
        if not own:
            del self._waiting[task.tenant]
        return True


class Turns:
    """A thread that advances up to `most` tasks in turn; the others wait. Ends with `close`.

    What a task has begun with is also ended on the thread.
    """

    def __init__(self, limit: int, most: int) -> None:
        self._queue, self._most = FairQueue[Task](limit), most
        self._active: list[Task] = []
        self._leaving: list[tuple[Task, BaseException | None]] = []  # had begun, and lost their places
        lock = threading.RLock()
        self._changed, self._advanced = threading.Condition(lock), threading.Condition(lock)
        self._num_rounds, self._is_closing = 0, False
        self._thread = threading.Thread(target=self._run, name="pic-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return len(self._queue)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def submit(self, task: Task) -> None:
        """Let a task wait for its turn. Raises QueueFullError; ClosedError."""
        with self._changed:
            if self._is_closing:
                raise ClosedError
            loser = self._queue.push(task)
            if loser is not None and loser.has_begun:
                self._leaving.append((loser, QueueFullError()))
                loser = None
            self._changed.notify()
        if loser is not None:
            self._end(loser, QueueFullError())

    def cancel(self, task: Task) -> None:
        """End a task: at once if it waits, else before its next step. `on_end` is not called any more."""
        with self._changed:
            task.is_cancelled = True
            if self._queue.remove(task) and task.has_begun:
                self._leaving.append((task, None))
            self._changed.notify()

    def give_way(self) -> None:
        """Wait, on another thread, until every task that runs had a step; no longer than a moment.

        For work that holds Python's lock, between two pieces of it.
        """
        with self._changed:
            before = self._num_rounds
            self._advanced.wait_for(
                lambda: self._num_rounds > before + 1 or not self._active or self._is_closing, _GIVEN_WAY_S
            )

    def close(self) -> None:
        """End the thread after the step that it is in."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            self._advanced.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while self._admit():
            self._end_leaving()
            for task in [*self._active]:
                if not self._advance(task):
                    self._active.remove(task)
        with self._changed:
            self._leaving += [(task, ClosedError()) for task in [*self._active, *self._queue.drain()]]
        self._end_leaving()

    def _admit(self) -> bool:
        """Wait for tasks, and take in as many as may run; False at the end."""
        with self._changed:
            self._num_rounds += 1
            self._advanced.notify_all()
            while not (self._is_closing or self._active or len(self._queue) or self._leaving):
                self._changed.wait()
            if len(self._queue):
                self._rest()
            while len(self._queue) and len(self._active) < self._most:
                running = Counter(task.tenant for task in self._active)
                self._active.append(self._queue.pop(running))
            return not self._is_closing

    def _rest(self) -> None:
        """Put tasks back whose turns ended: as many of those that wait begin, so the queue's limit holds."""
        for task in [task for task in self._active if task._has_rest and not task.is_cancelled]:
            self._active.remove(task)
            self._queue.put_back(task)

    def _end_leaving(self) -> None:
        with self._changed:
            leaving, self._leaving = self._leaving, []
        for task, error in leaving:
            self._end(task, error)

    def _advance(self, task: Task) -> bool:
        """One step of a task; False if it was the last one."""
        try:
            if not task.is_cancelled:
                task._running = task._running or task.steps(task)
                task._has_rest = next(task._running) is True
                return True
            self._end(task, None)
        except StopIteration:
            self._end(task, None)
        except BaseException as error:
            self._end(task, error)
        return False

    def _end(self, task: Task, error: BaseException | None) -> None:
        running, task._running = task._running, None
        try:
            close = getattr(running, "close", None)
            if close is not None:
                close()
            if not task.is_cancelled:
                task.on_end(error)
        except Exception:
            _log.exception("pic: a request could not be ended")
