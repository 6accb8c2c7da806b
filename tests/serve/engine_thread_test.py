"""The queue and the thread of an engine: bounded, fair, and free of what nobody waits for any more."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from greenlet import greenlet

from pictool.runtime import turns
from pictool.serve.backends.torch import engine_thread
from pictool.serve.backends.torch.engine_thread import (
    QUANTUM_S,
    ClosedError,
    EngineTask,
    EngineThread,
    FairQueue,
    QueueFullError,
    TaskCancelled,
)


def task(tenant: str) -> EngineTask:
    return EngineTask(tenant, lambda _: None, lambda _: None)


def test_a_task_for_which_nobody_waits_runs_while_no_other_does() -> None:
    thread, said, begun, may_end = EngineThread(10, 1), list[str](), threading.Event(), threading.Event()

    def idle(own: EngineTask) -> None:
        begun.set()
        while not may_end.is_set():
            own.checkpoint()
        said.append("idle")

    def work(own: EngineTask) -> None:
        may_end.set()
        for step in range(3):
            said.append(f"step {step}")
            own.checkpoint()

    ended = threading.Event()
    try:
        thread.submit(EngineTask("a", idle, lambda _: ended.set(), is_idle=True))
        assert begun.wait(60)
        thread.submit(EngineTask("a", work, lambda _: None))
        assert ended.wait(60)
    finally:
        thread.close()
    assert said == ["step 0", "step 1", "step 2", "idle"]


def test_tenants_take_turns_whoever_came_first() -> None:
    queue, running = FairQueue[EngineTask](100), Counter[str]()
    for tenant in "aaaaaabc":
        queue.push(task(tenant))
    assert [queue.pop(running).tenant for _ in range(8)] == [*"abcaaaaa"]


def test_who_runs_least_is_next() -> None:
    queue = FairQueue[EngineTask](100)
    for tenant in "aab":
        queue.push(task(tenant))
    assert queue.pop(Counter({"a": 2, "b": 1})).tenant == "b"
    assert queue.pop(Counter({"a": 2, "c": 1})).tenant == "a"


def test_a_full_queue_gives_a_place_to_whom_has_fewer() -> None:
    queue = FairQueue[EngineTask](4)
    tasks = [task("a") for _ in range(4)]
    for entry in tasks:
        assert queue.push(entry) is None
    with pytest.raises(QueueFullError):
        queue.push(task("a"))
    assert queue.push(task("b")) is tasks[3] and queue.push(task("b")) is tasks[2]
    for tenant in "ab":
        with pytest.raises(QueueFullError):
            queue.push(task(tenant))
    assert len(queue) == 4
    assert queue.push(task("c")) is not None, "of the two who have most"


def test_what_is_removed_has_no_place() -> None:
    queue, one = FairQueue[EngineTask](1), task("a")
    queue.push(one)
    assert queue.remove(one) and not queue.remove(one) and len(queue) == 0
    queue.push(task("b"))


class Recorder:
    """Tasks that write down their steps."""

    def __init__(self, turns: EngineThread) -> None:
        self.turns, self.seen, self.ended = turns, list[str](), dict[str, BaseException | None]()
        self.gate, self.all_ended = threading.Event(), threading.Semaphore(0)

    def submit(self, name: str, count: int, fails: bool = False) -> EngineTask:
        def work(own: EngineTask) -> None:
            self.gate.wait()
            for index in range(count):
                self.seen.append(f"{name}{index}")
                own.checkpoint()
            if fails:
                raise ValueError(name)

        def end(error: BaseException | None) -> None:
            self.ended[name] = error
            self.all_ended.release()

        entry = EngineTask(name[0], work, end)
        self.turns.submit(entry)
        return entry

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.all_ended.acquire(timeout=60)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    turns = EngineThread(8, 2)
    recorder = Recorder(turns)
    yield recorder
    recorder.gate.set()
    turns.close()


def test_tasks_advance_in_turn_and_errors_are_their_own(recorder: Recorder) -> None:
    recorder.submit("a", 3)
    recorder.submit("b", 2, fails=True)
    recorder.submit("c", 1)
    recorder.gate.set()
    recorder.wait(count=3)
    assert recorder.seen.index("b0") < recorder.seen.index("a1") < recorder.seen.index("b1")
    assert isinstance(recorder.ended.pop("b"), ValueError) and recorder.ended == {"a": None, "c": None}


def test_cancelled_tasks_end_without_a_word(recorder: Recorder) -> None:
    running = recorder.submit("a", 1000)
    waiting = [recorder.submit(f"b{i}", 1) for i in range(5)]
    for entry in (running, *waiting[1:]):
        recorder.turns.cancel(entry)
    recorder.gate.set()
    recorder.submit("c", 1)
    recorder.wait(count=2)
    assert set(recorder.ended) == {"b0", "c"} and len(recorder.seen) < 1000
    assert recorder.turns.num_waiting == 0


def test_the_queue_is_bounded(recorder: Recorder) -> None:
    for i in range(8):
        recorder.submit(f"a{i}", 1)
    with pytest.raises(QueueFullError):
        for i in range(8, 12):  # up to two have left the queue
            recorder.submit(f"a{i}", 1)
    assert recorder.turns.num_waiting <= 8


def test_no_tenant_waits_for_another_s_long_answers(recorder: Recorder) -> None:
    long = [recorder.submit(f"a{i}", 1_000_000) for i in range(4)]
    recorder.gate.set()
    recorder.submit("b", 3)
    recorder.wait(count=1)
    assert recorder.ended == {"b": None} and recorder.turns.num_waiting == 2
    for entry in long:
        recorder.turns.cancel(entry)


def test_a_tenant_s_first_task_takes_nobody_s_place_in_a_full_queue(recorder: Recorder) -> None:
    long = [recorder.submit(f"a{i}", 1_000_000) for i in range(2)]
    while recorder.turns.num_waiting:
        time.sleep(0.001)
    waiting = [recorder.submit(f"a{i}", 1) for i in range(2, 10)]
    recorder.submit("b", 1)
    recorder.gate.set()
    recorder.wait(count=1)
    assert recorder.ended == {"b": None}
    for entry in (*waiting, *long):
        recorder.turns.cancel(entry)


class Computing:
    """Tasks that compute, by a clock that only computing moves.

    Attributes:
        done: how many parts of each task are computed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.done, self.all_ended, self._now = Counter[str](), threading.Semaphore(0), 0.0
        self.gate = threading.Event()
        monkeypatch.setattr(engine_thread, "time", self)
        self.thread = EngineThread(100, most)

    def perf_counter(self) -> float:
        return self._now

    def submit(self, name: str, num_parts: int, quanta: float, then: Callable[[], None] = lambda: None) -> EngineTask:
        """Let a task compute parts of so many quanta each, and call `then` at its end."""

        def work(_: EngineTask) -> None:
            self.gate.wait()
            for _part in range(num_parts):
                turns.checkpoint()
                self._now += quanta * QUANTUM_S
                self.done[name] += 1
            then()

        entry = EngineTask(name[0], work, lambda _: self.all_ended.release())
        self.thread.submit(entry)
        return entry

    def run(self, count: int) -> None:
        self.gate.set()
        for _ in range(count):
            assert self.all_ended.acquire(timeout=60)
        self.thread.close()


@pytest.mark.parametrize("short", ["b", "a2"], ids=["another's", "the same tenant's"])
def test_a_short_task_has_its_share_of_the_time_beside_a_long_one(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three quanta, while a long one's single parts take two each: it waits for those that begin before it ends."""
    computing, long_parts = Computing(monkeypatch, most=4), 0

    def note() -> None:
        nonlocal long_parts
        long_parts = computing.done["a1"]

    computing.submit("a1", 200, 2.0)
    computing.submit(short, 30, 0.1, note)
    computing.run(count=2)
    assert 1 <= long_parts <= 3 and computing.done["a1"] == 200


def test_a_long_task_has_its_share_beside_short_ones_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short task comes as soon as one has ended: the long one is done when they have computed as long as it."""
    computing, num_short, is_over = Computing(monkeypatch, most=4), 0, threading.Event()

    def come() -> None:
        nonlocal num_short
        num_short += 1
        if not is_over.is_set() and num_short < 1000:
            computing.submit("b", 10, 0.1, come)

    computing.submit("a", 20, 1.0, is_over.set)
    computing.submit("b", 10, 0.1, come)
    computing.gate.set()
    assert is_over.wait(60)
    computing.thread.close()
    assert 10 <= num_short <= 45


def test_a_cancelled_task_ends_before_its_turn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = Computing(monkeypatch, most=1)
    long = computing.submit("a", 1_000_000, 0.0, lambda: None)
    computing.thread.cancel(long)
    computing.gate.set()
    computing.thread.close()
    assert computing.done["a"] == 0


def begun(tenant: str) -> EngineTask:
    """A task that waits for another turn."""
    entry = task(tenant)
    entry._running = greenlet(lambda _: None)
    return entry


def test_a_task_that_has_begun_loses_its_place_last() -> None:
    queue = FairQueue[EngineTask](3)
    new, old = task("a"), begun("a")
    for entry in (begun("a"), new, old):
        queue.push(entry)
    assert queue.push(task("b")) is new
    assert queue.push(task("c")) is old, "nobody is kept out for ever"


def in_turns(name: str, seen: list[str], turns: int, gate: threading.Event) -> Callable[[EngineTask], None]:
    """The work of a task with several turns, each of two steps."""

    def work(own: EngineTask) -> None:
        gate.wait()
        try:
            for turn in range(turns):
                seen.append(f"{name}{turn}")
                own.checkpoint()
                own.checkpoint(ends_turn=True)
        except TaskCancelled:
            seen.append(f"{name} is gone")
            raise
        finally:
            seen.append(f"{name} ended on {threading.current_thread().name}")

    return work


def test_a_long_task_lets_others_in_between_its_turns_and_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, gate, seen, ended = EngineThread(2, 1), threading.Event(), list[str](), threading.Semaphore(0)
    most_waiting = 0

    def end(error: BaseException | None) -> None:
        assert error is None
        ended.release()

    def watched(name: str, count: int) -> EngineTask:
        return EngineTask("t", in_turns(name, seen, count, gate), end)

    def counted(own: EngineTask, ends_turn: bool = False) -> None:
        nonlocal most_waiting
        most_waiting = max(most_waiting, turns.num_waiting)
        checkpoint(own, ends_turn)

    checkpoint = EngineTask.checkpoint
    monkeypatch.setattr(EngineTask, "checkpoint", counted)
    turns.submit(watched("a", 4))
    while turns.num_waiting:
        time.sleep(0.001)
    turns.submit(watched("b", 1))
    turns.submit(watched("c", 2))
    with pytest.raises(QueueFullError):
        turns.submit(watched("d", 1))
    gate.set()
    for _ in range(3):
        assert ended.acquire(timeout=60)
    turns.close()
    begins = [entry for entry in seen if "ended" not in entry]
    assert begins == ["a0", "b0", "c0", "a1", "c1", "a2", "a3"] and most_waiting <= 2


def test_a_task_that_vanishes_between_two_turns_is_ended_on_the_thread() -> None:
    turns, gate, seen, ended = EngineThread(4, 1), threading.Event(), list[str](), threading.Semaphore(0)
    long = EngineTask("a", in_turns("a", seen, 9, gate), lambda _: seen.append("told"))

    turns.submit(long)
    turns.submit(EngineTask("b", lambda _: turns.cancel(long), lambda _: ended.release()))
    gate.set()
    assert ended.acquire(timeout=60)
    turns.close()
    assert seen == ["a0", "a is gone", "a ended on pic-engine"]


def test_at_the_end_all_are_told() -> None:
    turns, told, inside, gate = EngineThread(4, 1), list[BaseException | None](), threading.Event(), threading.Event()

    def work(own: EngineTask) -> None:
        inside.set()
        gate.wait()
        own.checkpoint()

    for tenant in "ab":
        turns.submit(EngineTask(tenant, work, told.append))
    assert inside.wait(60)
    closing = threading.Thread(target=turns.close)
    closing.start()
    while not turns._is_closing:
        time.sleep(0.001)
    gate.set()
    closing.join()
    assert [type(error) for error in told] == [ClosedError, ClosedError]
    with pytest.raises(ClosedError):
        turns.submit(task("a"))
