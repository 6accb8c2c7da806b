"""Tasks side by side: batches, order, and what a failure leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pictool.spans import tasks
from pictool.spans.tasks import Task, run, together

Tree = list["Tree"] | int  # a number asks for itself, a list has its children side by side and then asks for their sum


def total(tree: Tree, done: list[int]) -> Task[int, int, int]:
    asked = tree if isinstance(tree, int) else sum((yield from together([total(child, done) for child in tree])))
    if asked % 7 == 6:
        raise ValueError(asked)
    (outcome,) = yield (asked,)
    done.append(outcome)
    return outcome


def one_by_one(tree: Tree, done: list[int]) -> int:
    asked = tree if isinstance(tree, int) else sum(one_by_one(child, done) for child in tree)
    if asked % 7 == 6:
        raise ValueError(asked)
    done.append(asked)
    return asked


def make_tree(rng: random.Random, depth: int = 4) -> Tree:
    if not depth or rng.random() < 0.3:
        return rng.randrange(40)
    return [make_tree(rng, depth - 1) for _ in range(rng.randrange(4))]


def test_what_is_ready_is_asked_for_at_once() -> None:
    batches: list[list[int]] = []

    def perform(batch: Sequence[int]) -> Sequence[int]:
        batches.append(list(batch))
        return batch

    assert run(total([[1, 2], 8, [[3], 4]], []), perform) == 18
    assert batches == [[1, 2, 8, 3, 4], [3, 3], [7], [18]]
    assert run(together([]), perform) == [] and len(batches) == 4
    trees: list[Tree] = [[1, 2], 8]
    assert run(tasks.one_by_one(total(tree, []) for tree in trees), perform) == [3, 8]
    assert batches[4:] == [[1, 2], [3], [8]]


def test_failures_are_those_of_one_after_the_other() -> None:
    """The same error, and all that was done before it is done; nothing else of what comes after the one that failed."""
    rng, failed = random.Random(5), 0
    for _ in range(500):
        tree = make_tree(rng)
        want: list[int] = []
        got: list[int] = []
        try:
            result = one_by_one(tree, want)
        except ValueError as error:
            failed += 1
            with pytest.raises(ValueError, match=f"^{error}$"):
                run(total(tree, got), lambda batch: batch)
            assert not [value for value in want if want.count(value) > got.count(value)]
        else:
            assert run(total(tree, got), lambda batch: batch) == result
            assert sorted(got) == sorted(want)
    assert 50 < failed < 450
