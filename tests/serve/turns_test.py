"""The queue and the thread of an engine: bounded, fair, and free of what nobody waits for any more."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from pictool.serve.turns import FairQueue, QueueFullError, Task, Turns


def task(tenant: str) -> Task:
    return Task(tenant, lambda _: iter(()), lambda _: None)


def test_tenants_take_turns_whoever_came_first() -> None:
    queue, running = FairQueue[Task](100), Counter[str]()
    for tenant in "aaaaaabc":
        queue.push(task(tenant))
    assert [queue.pop(running).tenant for _ in range(8)] == [*"abcaaaaa"]


def test_who_runs_least_is_next() -> None:
    queue = FairQueue[Task](100)
    for tenant in "aab":
        queue.push(task(tenant))
    assert queue.pop(Counter({"a": 2, "b": 1})).tenant == "b"
    assert queue.pop(Counter({"a": 2, "c": 1})).tenant == "a"


def test_a_full_queue_gives_a_place_to_whom_has_fewer() -> None:
    queue = FairQueue[Task](4)
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
    queue, one = FairQueue[Task](1), task("a")
    queue.push(one)
    assert queue.remove(one) and not queue.remove(one) and len(queue) == 0
    queue.push(task("b"))


class Recorder:
    """Tasks that write down their steps."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.seen, self.ended = turns, list[str](), dict[str, BaseException | None]()
        self.gate, self.all_ended = threading.Event(), threading.Semaphore(0)

    def submit(self, name: str, count: int, fails: bool = False) -> Task:
        def steps(_: Task) -> Iterator[None]:
            self.gate.wait()
            for index in range(count):
                self.seen.append(f"{name}{index}")
                yield
            if fails:
                raise ValueError(name)

        def end(error: BaseException | None) -> None:
            self.ended[name] = error
            self.all_ended.release()

        entry = Task(name[0], steps, end)
        self.turns.submit(entry)
        return entry

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.all_ended.acquire(timeout=10)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    turns = Turns(8, 2)
    recorder = Recorder(turns)
    yield recorder
    recorder.gate.set()
    turns.close()


def test_tasks_advance_in_turn_and_errors_are_their_own(recorder: Recorder) -> None:
    recorder.submit("a", 3)
    recorder.submit("b", 2, fails=True)
    recorder.submit("c", 1)
    recorder.gate.set()
    recorder.wait(3)
    assert recorder.seen.index("b0") < recorder.seen.index("a1") < recorder.seen.index("b1")
    assert isinstance(recorder.ended.pop("b"), ValueError) and recorder.ended == {"a": None, "c": None}


def test_cancelled_tasks_end_without_a_word(recorder: Recorder) -> None:
    running = recorder.submit("a", 1000)
    waiting = [recorder.submit(f"b{i}", 1) for i in range(5)]
    for entry in (running, *waiting[1:]):
        recorder.turns.cancel(entry)
    recorder.gate.set()
    recorder.submit("c", 1)
    recorder.wait(2)
    assert set(recorder.ended) == {"b0", "c"} and len(recorder.seen) < 1000
    assert recorder.turns.num_waiting == 0


def test_the_queue_is_bounded(recorder: Recorder) -> None:
    for i in range(8):
        recorder.submit(f"a{i}", 1)
    with pytest.raises(QueueFullError):
        for i in range(8, 12):  # up to two have left the queue
            recorder.submit(f"a{i}", 1)
    assert recorder.turns.num_waiting <= 8
