"""The thread that one engine runs on: requests take turns, and wait in a bounded queue that is fair.

A task is plain code; what it runs calls a checkpoint between two steps, and within a long one (`runtime/turns.py`). The
next turn is of a task that has computed least. Tasks run in greenlets on one thread, since each thread that computes
has an OpenMP team of its own (docs/design.md §5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from greenlet import greenlet

from pictool.runtime.turns import Pause, set_checkpoint

QUANTUM_S = 0.05  # a turn ends at the first checkpoint after it; tasks that have computed as long are equals
QUIET_S = 0.5  # after which idle tasks run: between two requests of a busy server they would delay the second
_log = logging.getLogger("pictool.serve")


class QueueFullError(Exception):
    """There is no place left for a task of this tenant."""


class ClosedError(Exception):
    """The thread ended before the task did."""


class TaskCancelled(BaseException):
    """A task was cancelled; raised where it calls `checkpoint`."""


@dataclass(eq=False)
class EngineTask:
    """Work on the engine's thread. `work` and `on_end`, with the error if there is one, are called there.

    `busy_s` is for how long it has computed, or as long as others that have their turns when it began. One for which
    nobody waits `is_idle`: it runs while no other task does, and none did a moment before.
    """

    tenant: str
    work: Callable[[EngineTask], None]
    on_end: Callable[[BaseException | None], None]
    is_idle: bool = False
    is_cancelled: bool = False
    busy_s: float = 0.0
    _turn_began: float = field(default=0.0, repr=False)
    _running: greenlet | None = field(default=None, repr=False)
    _has_ended_turn: bool = field(default=False, repr=False)
    _has_paused: bool = field(default=False, repr=False)

    @property
    def has_begun(self) -> bool:
        return self._running is not None

    def checkpoint(self, ends_turn: bool = False) -> None:
        """Let other tasks have their steps; called within `work`, outside of what others must wait for, as a lock.

        Args:
            ends_turn: if other tasks wait, wait for the next turn as they do. The task keeps its place: a long one is
                never refused half-way, and none has the thread to itself.

        Raises:
            TaskCancelled: the task has been cancelled, or has lost its place.
        """
        import torch  # the queue of other engines imports this module, and none

        assert self._running is not None
        # Modes of torch are the thread's: others run in the default ones, and this task goes on in its own.
        with torch.inference_mode(False):
            self._running.parent.switch(ends_turn)

    def advance(self) -> bool:
        """Run to the next checkpoint, or to the end; False at the end. Raises what `work` raises."""
        if self._running is None:
            self._running = greenlet(self._work)
        self._turn_began = time.perf_counter()
        try:
            self._has_ended_turn = self._running.switch() is True
        finally:
            self.busy_s += time.perf_counter() - self._turn_began
        return not self._running.dead

    def _work(self) -> None:
        set_checkpoint(self._pause)
        self.work(self)

    def _pause(self, pause: Pause) -> None:
        """A checkpoint of what it runs. Within a computation others run after `QUANTUM_S`, as they cost its caches.

        The first one ends no turn: nothing was computed.
        """
        ends_turn = pause == "turn" and self._has_paused
        self._has_paused = True
        is_over = self.is_cancelled or self.is_idle or time.perf_counter() - self._turn_began >= QUANTUM_S
        if ends_turn or pause == "step" or is_over:
            self.checkpoint(ends_turn)

    def stop(self) -> None:
        """End the work at its checkpoint, if it has begun and not ended."""
        running, self._running = self._running, None
        if running is not None and not running.dead:
            with suppress(TaskCancelled):
                running.throw(TaskCancelled)


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

    def has(self, tenant: str) -> bool:
        """Whether a task of a tenant waits."""
        return tenant in self._waiting

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

    def next_tenant(self, running: Counter[str]) -> str:
        """Whose the next task is. `running` counts those of each tenant that run."""
        return min(self._waiting, key=lambda name: running[name])  # of equals the first

    def pop(self, running: Counter[str]) -> W:
        """The next task, of `next_tenant`."""
        tenant = self.next_tenant(running)
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


class EngineThread:
    """A thread that advances up to `most` tasks in turn; the others wait. Ends with `close`.

    Each round advances those that have computed least. One that comes has computed as much as these: it neither waits
    until the others have ended, nor do they wait for it.

    A tenant of which none runs or waits begins one beyond `most`: no other tenant's tasks keep it waiting. A task that
    has begun is also ended on the thread.
    """

    def __init__(self, limit: int, most: int) -> None:
        self._queue, self._most = FairQueue[EngineTask](limit), most
        self._active: list[EngineTask] = []
        self._busy_at = -QUIET_S  # when another than an idle task last ran, by time.perf_counter
        self._least_s = 0.0  # for which an active task has computed, when the last ones came
        self._leaving: list[tuple[EngineTask, BaseException | None]] = []  # had begun, and lost their places
        self._changed, self._is_closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="pic-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return len(self._queue)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, task: EngineTask) -> None:
        """Let a task wait for its turn. Raises QueueFullError; ClosedError."""
        with self._changed:
            if self._is_closing:
                raise ClosedError
            loser = None
            if self._queue.has(task.tenant) or any(task.tenant == active.tenant for active in [*self._active]):
                loser = self._queue.push(task)
            else:
                self._queue.put_back(task)  # it begins with the next round
            if loser is not None and loser.has_begun:
                self._leaving.append((loser, QueueFullError()))
                loser = None
            self._changed.notify()
        if loser is not None:
            self._end(loser, QueueFullError())

    def cancel(self, task: EngineTask) -> None:
        """End a task: at once if it waits, else before its next step. `on_end` is not called any more."""
        with self._changed:
            task.is_cancelled = True
            if self._queue.remove(task) and task.has_begun:
                self._leaving.append((task, None))
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the step that it is in."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._admit():
            self._end_leaving()
            for task in self._least_busy():
                if not self._advance(task):
                    self._active.remove(task)
                if not task.is_idle:
                    self._busy_at = time.perf_counter()
        with self._changed:
            self._leaving += [(task, ClosedError()) for task in [*self._active, *self._queue.drain()]]
        self._end_leaving()

    def _admit(self) -> bool:
        """Wait for tasks, and take in as many as may run; False at the end."""
        with self._changed:
            while not (self._is_closing or self._least_busy() or len(self._queue) or self._leaving):
                self._changed.wait(QUIET_S if self._active else None)
            self._least_s = min((task.busy_s for task in self._active if not task.is_idle), default=self._least_s)
            if len(self._queue):
                self._rest()
            running = Counter(task.tenant for task in self._active if not task.is_idle)
            while len(self._queue) and (
                running.total() < self._most or not running[self._queue.next_tenant(running)]
            ):  # fmt: skip
                task = self._queue.pop(running)
                task.busy_s = max(task.busy_s, self._least_s)
                self._active.append(task)
                running[task.tenant] += not task.is_idle
            return not self._is_closing

    def _least_busy(self) -> list[EngineTask]:
        """The active tasks that have computed least, and those that have hardly more; idle ones only after a pause."""
        active = [task for task in self._active if not task.is_idle or task.is_cancelled]
        if not active and time.perf_counter() - self._busy_at >= QUIET_S:
            active = self._active
        least_s = min((task.busy_s for task in active), default=0.0)
        return [task for task in active if task.busy_s <= least_s + QUANTUM_S]

    def _rest(self) -> None:
        """Put tasks back whose turns ended: as many of those that wait begin, so the queue's limit holds."""
        for task in [task for task in self._active if task._has_ended_turn and not task.is_cancelled]:
            self._active.remove(task)
            self._queue.put_back(task)

    def _end_leaving(self) -> None:
        with self._changed:
            leaving, self._leaving = self._leaving, []
        for task, error in leaving:
            self._end(task, error)

    def _advance(self, task: EngineTask) -> bool:
        """One step of a task; False if it was the last one."""
        failed: BaseException | None = None
        try:
            if not task.is_cancelled and task.advance():
                return True
        except BaseException as error:
            failed = error
        self._end(task, failed)
        return False

    def _end(self, task: EngineTask, error: BaseException | None) -> None:
        try:
            task.stop()
            if not task.is_cancelled:
                task.on_end(error)
        except Exception:
            _log.exception("pic: a request could not be ended")
