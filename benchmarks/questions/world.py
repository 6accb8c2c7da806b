"""The embedded world: prompts that no shipped model was trained on, and questions of every kind about them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from pictool.errors import InputError
from pictool.eval.datasets.base import Case, Dataset
from training.world.generate import KINDS, WorldPrompt, write_prompt

MAX_CHUNKS = 32  # the names of the world do not last for more


@dataclass(frozen=True)
class World(Dataset):
    """Synthetic books (docs/design.md §7), a page per chunk, with up to `per_kind` questions of each kind per prompt.

    The seeds begin with "eval-"; those of training begin with "train-", "tokenizer", "held-out" and "fixtures-".
    Two-hop questions are rare: of 6 chunks, one prompt in four has any. Only the whole answer is right.
    """

    name: ClassVar[str] = "world"
    reference: ClassVar[str] = "training.world.generate"
    seed: int = 0
    prompts: int = 100
    chunks: int = 6  # 1 to 32
    kinds: tuple[str, ...] = KINDS
    per_kind: int = 3

    def __post_init__(self) -> None:
        for field, most in (("prompts", None), ("chunks", MAX_CHUNKS), ("per_kind", None)):
            value = getattr(self, field)
            if value < 1 or (most is not None and value > most):
                raise InputError(f"world: {field}={value} must be " + (f"from 1 to {most}" if most else "1 or more"))
        if not self.kinds or len(set(self.kinds)) < len(self.kinds) or not set(self.kinds) <= set(KINDS):
            raise InputError(f"world: kinds={','.join(self.kinds)} must be some of {', '.join(KINDS)}, each once")

    def cases(self) -> Iterator[Case]:
        is_empty = True
        for number in range(self.prompts):
            for case in self._cases_of(number, _write(self.seed, self.chunks, number)):
                is_empty = False
                yield case
        if is_empty:
            raise InputError(
                f"world: {self.prompts} prompts of {self.chunks} chunks ask no {' or '.join(self.kinds)} question"
            )

    def _cases_of(self, number: int, prompt: WorldPrompt) -> Iterator[Case]:
        for kind in self.kinds:
            questions = (question for question in prompt.questions if question.kind == kind)
            for i, question in enumerate(islice(questions, self.per_kind)):
                yield Case(
                    id=f"{self.seed}-{self.chunks}-{number}-{kind}-{i}",
                    documents=prompt.pages,
                    query=question.text,
                    answers=(question.answer,),
                    kind=kind,
                    metric="em",
                    max_new_tokens=8,
                    stop=("\n",),
                )


def _write(seed: int, chunks: int, number: int) -> WorldPrompt:
    """One prompt. A draw that runs out of names (some do, near 32 chunks) is drawn again."""
    for attempt in range(100):
        with suppress(IndexError):
            return write_prompt(random.Random(f"eval-{seed}-{chunks}-{number}-{attempt}"), chunks)
    raise AssertionError(f"the names of the world do not last for {chunks} chunks")
