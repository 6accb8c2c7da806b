"""Batches: the pages of several prompts, many questions after each, and where every answer is."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.world.generate import (
    BOOKS,
    KINDS,
    Fact,
    PageShape,
    Question,
    World,
    WorldPrompt,
    question_text,
    write_prompt,
)

PADDING = -1


@dataclass(frozen=True)
class Batch:
    """Prompts side by side: documents in the first `num_docs` columns, questions after them; int64 [rows, length] each.

    A question's positions go on where its documents end, and it sees them and itself only: every question is asked
    as if it were the only one.
    """

    tokens: Tensor
    positions: Tensor
    blocks: Tensor  # 0 document, j question j, -1 padding
    kinds: Tensor  # at the tokens of an answer the index of its question's kind (`Encoder.kinds`), -1 elsewhere
    num_docs: int
    subjects: Tensor  # [facts, 3]: row, where a value is, where its subject is named
    sources: Tensor  # [answers, 3]: row, where a value is predicted, where it is in the documents
    asked: Tensor  # [questions, 3]: row, where an answer begins to be predicted, where its question names a subject
    bridges: Tensor  # [answers, 3]: row, where an answer is predicted, where the documents name what leads to it

    def question_mask(self) -> Tensor:
        """Additive mask [rows, 1, length - num_docs, length] of the questions' columns."""
        asks, seen = self.blocks[:, self.num_docs :, None], self.blocks[:, None, :]
        causal = torch.ones(self.tokens.shape[1], self.tokens.shape[1], dtype=torch.bool).tril()[self.num_docs :]
        allowed = causal & ((seen == 0) | ((seen == asks) & (seen > 0)))
        allowed |= torch.eye(self.tokens.shape[1], dtype=torch.bool)[self.num_docs :]  # padding sees itself
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]


@dataclass(frozen=True)
class Documents:
    """The tokens of one prompt's documents; `places` has for each fact where its value and its subject are."""

    tokens: list[int]
    prompt: WorldPrompt
    places: dict[Fact, tuple[int, int]]


@dataclass
class Columns:
    """What comes after the documents of one prompt."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    bridges: list[tuple[int, int]] = field(default_factory=list)


def choose(rng: random.Random, questions: Iterable[Question], most: int) -> list[Question]:
    """Up to `most` questions, the rarer kinds more likely."""
    rank = {"two-hop": 0, "carried": 1, "local": 2}
    chosen = sorted(questions, key=lambda question: rank.get(question.kind, 1) + rng.random() * 1.3)[:most]
    rng.shuffle(chosen)
    return chosen


class Encoder:
    """Turns prompts of a world into batches.

    Attributes:
        restated: share of facts that are asked as a statement to complete.
        bos: what prompts begin with, those that begin with a special token at all.
        kinds: of questions.
    """

    kinds: tuple[str, ...] = KINDS

    def __init__(self, tokenizer: Tokenizer, world: World = BOOKS, first: str = "<s>") -> None:
        self.tokenizer, self.world, self.restated = tokenizer, world, 0.0
        self.bos, self.eos = self.ids(first)[0], self.ids("</s>")[0]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def write(self, rng: random.Random, num_pages: int, shape: PageShape) -> WorldPrompt:
        """The pages of a prompt, and what is asked about them."""
        return write_prompt(rng, num_pages, shape, self.world)

    def documents(self, rng: random.Random, num_pages: int, shape: PageShape, has_bos: bool) -> Documents:
        """A prompt's pages, each tokenized on its own."""
        prompt = self.write(rng, num_pages, shape)
        pages = [self.ids(page) for page in prompt.pages]
        tokens, starts = [self.bos] * has_bos, []
        for page in pages:
            starts.append(len(tokens))
            tokens += page
        starts.append(len(tokens))
        return Documents(
            tokens, prompt, {fact: at for fact in prompt.facts if (at := self._place(fact, tokens, starts))}
        )

    def _place(self, fact: Fact, tokens: list[int], starts: list[int]) -> tuple[int, int] | None:
        """Where the fact's value is, and the last place before it where its subject is named."""
        value, subject = self._last(fact.value), self._last(fact.subject)
        at = next((i for i in range(starts[fact.page], starts[fact.page + 1]) if tokens[i] == value), None)
        if at is None:
            return None
        named = next((i for i in range(at, starts[fact.named_on] - 1, -1) if tokens[i] == subject), None)
        return None if named is None else (at, named)

    def _last(self, word: str) -> int:
        return self.ids(" " + word)[-1]

    def _ask(self, rng: random.Random, question: Question) -> tuple[list[int], list[int]]:
        """The question and its answer."""
        if len(question.facts) == 1 and rng.random() < self.restated:
            fact = question.facts[0]
            statement = fact.attribute.statements[0].format(s=fact.subject, v="|").partition(" |")[0]
            return self.ids(statement), self.ids(" " + question.answer)
        return self.ids(question_text(question.text)), [*self.ids(" " + question.answer), self.eos]

    def columns(self, rng: random.Random, docs: Documents, most: int) -> Columns:
        """Up to `most` questions over the documents."""
        start, out = len(docs.tokens), Columns()
        for block, question in enumerate(choose(rng, docs.prompt.questions, most), 1):
            ask, answer = self._ask(rng, question)
            for fact in question.facts:
                if fact in docs.places and (value := self._last(fact.value)) in answer:
                    row = len(out.tokens) + len(ask) + answer.index(value) - 1
                    out.sources.append((row, docs.places[fact][0]))
            end, subjects = len(out.tokens) + len(ask) - 1, [self._last(fact.subject) for fact in question.facts]
            out.asked += [(end, len(out.tokens) + ask.index(subject)) for subject in subjects if subject in ask]
            out.tokens += ask + answer
            out.positions += range(start, start + len(ask) + len(answer))
            out.blocks += [block] * (len(ask) + len(answer))
            out.kinds += [-1] * len(ask) + [self.kinds.index(question.kind)] * len(answer)
        return out

    def batch(
        self, rng: random.Random, rows: int, num_pages: int, shape: PageShape, most: int, p_bos: float = 0.7
    ) -> Batch:
        """`rows` prompts of `num_pages` pages; some (1 - `p_bos`) lack BOS, so that any token learns to be a sink."""
        docs = [self.documents(rng, num_pages, shape, rng.random() < p_bos) for _ in range(rows)]
        questions = [self.columns(rng, doc, most) for doc in docs]
        return lay_out([doc.tokens for doc in docs], [[*doc.places.values()] for doc in docs], questions)


def lay_out(
    docs: Sequence[list[int]], subjects: Sequence[Sequence[tuple[int, int]]], questions: Sequence[Columns]
) -> Batch:
    """A batch of prompts: of each its documents' tokens, (value, subject) places in them, and what comes after them."""
    n, m = max(map(len, docs)), max(len(columns.tokens) for columns in questions)

    def grid(left: list[list[int]], right: list[list[int]], fill: int) -> Tensor:
        pairs = zip(left, right, strict=True)
        return torch.tensor([a + [fill] * (n - len(a)) + b + [fill] * (m - len(b)) for a, b in pairs])

    def cells(places: Iterable[Iterable[tuple[int, int]]], first: int, second: int) -> Tensor:
        found = [(i, first + a, second + b) for i, pairs in enumerate(places) for a, b in pairs]
        return torch.tensor(found, dtype=torch.int64).view(-1, 3)

    return Batch(
        tokens=grid([*docs], [columns.tokens for columns in questions], 0),
        positions=grid([list(range(n))] * len(docs), [columns.positions for columns in questions], 0),
        blocks=grid([[0] * len(doc) for doc in docs], [columns.blocks for columns in questions], PADDING),
        kinds=grid([[]] * len(docs), [columns.kinds for columns in questions], -1),
        num_docs=n,
        subjects=cells(subjects, 0, 0),
        sources=cells((columns.sources for columns in questions), n, 0),
        asked=cells((columns.asked for columns in questions), n, n),
        bridges=cells((columns.bridges for columns in questions), n, 0),
    )
