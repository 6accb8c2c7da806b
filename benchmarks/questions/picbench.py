"""picbench: generated questions over documents, of the kinds at which linking may fail. Nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from benchmarks.questions.tasks import TASKS, Draft, Draw
from pictool.errors import InputError
from pictool.eval.datasets.base import Case, Dataset

ORDERS = 3  # in which the documents of a case of `order` come


@dataclass(frozen=True)
class Picbench(Dataset):
    """Thirteen tasks (`tasks.py`) at a grid of numbers and lengths of documents.

    Lengths are in words, about: a document is filled up to so many, and longer if its facts are. A task's cases are the
    same whatever else is asked for, and the first ones are of all tasks. `order` asks each question over the same
    documents in three orders.
    """

    name: ClassVar[str] = "picbench"
    reference: ClassVar[str] = "benchmarks.questions.tasks; RULER, arXiv:2404.06654"
    seed: int = 0
    tasks: tuple[str, ...] = tuple(TASKS)
    documents: tuple[int, ...] = (4, 16)
    words: tuple[int, ...] = (50, 200)  # of a document
    cases_each: int = 5  # of a task, at each number and length

    def __post_init__(self) -> None:
        for name, values in (("tasks", self.tasks), ("documents", self.documents), ("words", self.words)):
            if not values or len(set(values)) < len(values):
                raise InputError(f"picbench: {name}= must name at least one, each once")
        for name, value, least in (
            ("documents", min(self.documents), 2), ("words", min(self.words), 1), ("cases_each", self.cases_each, 1)
        ):  # fmt: skip
            if value < least:
                raise InputError(f"picbench: {name}={value} must be {least} or more")
        if unknown := sorted(set(self.tasks) - set(TASKS)):
            raise InputError(f"picbench: tasks={','.join(unknown)} must be some of {', '.join(TASKS)}")

    def cases(self) -> Iterator[Case]:
        for number in range(self.cases_each):
            for count in self.documents:
                for words in self.words:
                    for task in self.tasks:
                        yield from _cases(f"{task}-{count}x{words}-{self.seed}-{number}", task, count, words)


def _cases(name: str, task: str, count: int, words: int) -> Iterator[Case]:
    draw = Draw(f"picbench-{name}")
    draft = TASKS[task](draw, count)
    texts = [document(draw, draft, number, words) for number in range(count)]
    case = Case(
        name, tuple(texts), draft.query, draft.answers, kind=task, metric=draft.metric,
        max_new_tokens=draft.max_new_tokens, stop=("\n",) if draft.metric != "json" else (),
    )  # fmt: skip
    if task != "order":
        yield case
        return
    for order in range(ORDERS):
        yield replace(case, id=f"{name}-{order}", documents=tuple(texts))
        random.Random(f"picbench-{name}-{order}").shuffle(texts)


def document(draw: Draw, draft: Draft, number: int, words: int) -> str:
    facts = list(draft.facts[number])
    if draft.is_code:
        head, rest = facts[0], facts[1:]
        return "\n\n".join([head, *_filled(draw.code, rest, words), *rest]) + "\n"
    held = [text for text in (draft.first.get(number), draft.last.get(number)) if text]
    sentences = _filled(draw.filler, [*facts, *held], words)
    places = sorted(draw.random.randrange(len(sentences) + 1) for _ in facts)
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        sentences.insert(place, fact)
    return " ".join([*held[: number in draft.first], *sentences, *held[number in draft.first :]]) + "\n"


def _filled(filler: Callable[[], str], facts: Sequence[str], words: int) -> list[str]:
    """Filler that brings facts to a number of words."""
    missing, found = words - sum(len(fact.split()) for fact in facts), list[str]()
    while missing > 0:
        found.append(filler())
        missing -= len(found[-1].split())
    return found
