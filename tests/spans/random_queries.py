"""Random queries for differential tests."""

from __future__ import annotations

import random

from pictool.spans import dsl
from pictool.spans.operators.messages import Message
from pictool.spans.query import Query

WORDS = [
    "harbour",
    " festival",
    "é",
    "東京",
    "\n",
    "🙂 ",
    "hello",
    "  ",
    "<s>",
    "Gadwick",
    "7",
    ".",
    "\x1c",
    " a b c d e f",
]


def text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.choice([0, 1, 1, 3, 9])))


def message(rng: random.Random) -> Message:
    return rng.choice([dsl.system, dsl.user, dsl.user, dsl.assistant, dsl.assistant])(text(rng))


def flat(rng: random.Random, depth: int = 3) -> Query:
    """Messages under joins; a ⋈ has children."""
    if depth == 0 or rng.random() < 0.25:
        return message(rng)
    join = rng.choice([dsl.seq, dsl.par, dsl.plus, dsl.plus, dsl.cross, dsl.cross])
    least = 1 if join is dsl.cross else 0
    return join(*(flat(rng, depth - 1) for _ in range(rng.randint(least, 4))))
