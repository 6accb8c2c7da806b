"""Tasks that run side by side without threads: each yields what it waits for, and goes on with what came of it.

A task is a generator of batches: it yields requests, is sent as many outcomes, and returns its result. `together` makes
one task of many, whose batch is all that they wait for; so what is independent in a tree reaches an engine at once.
Requests keep the order in which the tasks would have made them `one_by_one`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from typing import TypeVar

Request = TypeVar("Request")
Outcome = TypeVar("Outcome")
Result = TypeVar("Result")
Task = Generator[Sequence[Request], Sequence[Outcome], Result]


def together(tasks: Sequence[Task[Request, Outcome, Result]]) -> Task[Request, Outcome, list[Result]]:
    """All tasks as one; its result is the list of theirs.

    A task that raises ends those after it, and is raised once those before it are done: what is done is then what
    would have been done one after the other.
    """
    results: dict[int, Result] = {}
    waiting: dict[int, Sequence[Request]] = {}
    failed: tuple[int, Exception] | None = None

    def advance(index: int, step: Callable[[], Sequence[Request]]) -> None:
        nonlocal failed
        if failed is not None and failed[0] < index:
            tasks[index].close()
            return
        try:
            waiting[index] = step()
        except StopIteration as stop:
            results[index] = stop.value
        except Exception as error:
            failed = index, error

    for index, task in enumerate(tasks):
        advance(index, lambda task=task: next(task))  # type: ignore[misc]
    while waiting:
        batch, waiting = waiting, {}
        outcomes = iter((yield [request for requests in batch.values() for request in requests]))
        for index, requests in batch.items():
            own = list(islice(outcomes, len(requests)))
            advance(index, lambda index=index, own=own: tasks[index].send(own))  # type: ignore[misc]
    if failed is not None:
        raise failed[1]
    return [results[index] for index in range(len(tasks))]


def one_by_one(tasks: Iterable[Task[Request, Outcome, Result]]) -> Task[Request, Outcome, list[Result]]:
    """All tasks as one, each begun once the one before it is done; its result is the list of theirs."""
    results: list[Result] = []
    for task in tasks:
        results.append((yield from task))  # noqa: PERF401 (no yield in a comprehension)
    return results


def run(task: Task[Request, Outcome, Result], perform: Callable[[Sequence[Request]], Sequence[Outcome]]) -> Result:
    """Run a task to its end.

    Args:
        perform: has a batch of requests done, which may be empty; returns their outcomes in the same order.
    """
    outcomes: Sequence[Outcome] = ()
    try:
        requests = next(task)
        while True:
            outcomes = perform(requests)
            requests = task.send(outcomes)
    except StopIteration as stop:
        result: Result = stop.value
        return result
