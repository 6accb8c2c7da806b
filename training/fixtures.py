"""The sample corpus: readable books of the world, and queries over several of their pages with answers.

    python -m training.fixtures fixtures

Every book is a run of pages (`docs/book-1-page-1.txt`, …). Names are unique over the corpus, so that any books can
stand in one prompt in any order; the pages of a book follow one another.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from training.world.generate import KINDS, PageShape, Question, WorldPrompt, write_prompt

NUM_BOOKS = 6
PAGES_PER_BOOK = 6
QUERIES_PER_KIND = 8


@dataclass(frozen=True)
class Query:
    """One line of queries.jsonl."""

    documents: tuple[str, ...]
    query: str
    answers: tuple[str, ...]
    kind: str


def names_of(prompt: WorldPrompt) -> set[str]:
    return {fact.subject for fact in prompt.facts} | {
        fact.value for fact in prompt.facts if isinstance(fact.attribute.values, str)
    }


def books() -> list[WorldPrompt]:
    """Books of one run of pages each, with no name in common."""
    found: list[WorldPrompt] = []
    used: set[str] = set()
    seed = 0
    while len(found) < NUM_BOOKS:
        prompt = write_prompt(random.Random(f"fixtures-{seed}"), PAGES_PER_BOOK, PageShape(max_filler_sentences=4))
        seed += 1
        is_one_book = all(
            not page.startswith(("Here begins", "This is the first", "A new book")) for page in prompt.pages[1:]
        )
        kinds = {question.kind for question in prompt.questions}
        if is_one_book and kinds == set(KINDS) and not used & names_of(prompt):
            found.append(prompt)
            used |= names_of(prompt)
    return found


def queries(corpus: list[WorldPrompt]) -> Iterable[Query]:
    """Questions of every kind over a whole book; every other one with a second book before it."""
    rng = random.Random("queries")
    for kind in KINDS:
        asked: list[tuple[int, Question]] = [
            (book, question)
            for book, prompt in enumerate(corpus)
            for question in prompt.questions
            if question.kind == kind
        ]
        rng.shuffle(asked)
        for number, (book, question) in enumerate(asked[:QUERIES_PER_KIND]):
            others = [other for other in range(len(corpus)) if other != book]
            linked = [rng.choice(others), book] if number % 4 == 3 else [book]
            documents = tuple(name(linked_book, page) for linked_book in linked for page in range(PAGES_PER_BOOK))
            yield Query(documents, question.text, (question.answer,), kind)


def name(book: int, page: int) -> str:
    return f"docs/book-{book + 1}-page-{page + 1}.txt"


def write(directory: Path) -> None:
    """Write docs/*.txt and queries.jsonl."""
    corpus = books()
    shutil.rmtree(directory / "docs", ignore_errors=True)
    (directory / "docs").mkdir(parents=True)
    for book, prompt in enumerate(corpus):
        for page, text in enumerate(prompt.pages):
            (directory / name(book, page)).write_text(text)
    lines = [json.dumps(vars(query)) for query in queries(corpus)]
    (directory / "queries.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
