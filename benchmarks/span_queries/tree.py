"""A judge over all candidates against a tree of calls (Span queries §6, figs. 16 and 17), on the embedded world.

Every candidate is a page that tells one fact of its own subject, with hay (sentences that say nothing) around it. The
judge is asked for the fact of one of them. Three queries answer:

- ``flat``: one call reads all candidates;
- ``tree``: the optimizer's tree of it (`reduce by tree`): the same question at every ply, over winners;
- ``extract``: inner calls read `arity` candidates each, and copy every fact of theirs out of the hay; the judge reads
  the sentences that are made of these.

The embedded model can copy and choose, but not decline: asked for a subject that is not there it names some value. So
``tree`` is measured for what it is.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.span_queries.options import TreeOptions
from benchmarks.span_queries.quality import last_answer
from pictool.bench.repeats import OnRun
from pictool.engines.torch import TorchEngine
from pictool.linker.grid import LabelledPolicy
from pictool.spans.dsl import assistant, fragment, g, plus, seq, user
from pictool.spans.optimise import optimise
from pictool.spans.query import Options, Query
from pictool.spans.running import RunOptions
from pictool.store.store import Store
from training.world.generate import ALL_KINDS, Attribute, Kind, filler

if TYPE_CHECKING:
    from pictool.runtime.model import Model

QUERIES = ("flat", "tree", "extract")
_OPENING = "Here begins a new book."  # as pages begin on which the embedded models were trained


@dataclass(frozen=True)
class TreePoint:
    """One amount of hay under one policy. `right`: share of right answers by query. `tokens`: of the flat prompt."""

    label: str
    hay: int
    tokens: float
    right: dict[str, float]
    runs: int

    def report(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Haystack:
    """Candidates, each with the beginning and the end of the sentence that tells its fact, and how that is asked."""

    pages: tuple[str, ...]
    stems: tuple[str, ...]
    ends: tuple[str, ...]
    questions: tuple[str, ...]
    asked: int
    answer: str

    @property
    def question(self) -> str:
        return self.questions[self.asked]


def bench_tree(
    model: Model, policies: Sequence[LabelledPolicy], options: TreeOptions, store: Store, on_run: OnRun
) -> list[TreePoint]:
    """Answer all three queries over drawn haystacks, which are the same for all policies."""
    engine = TorchEngine(model, store)
    points = []
    for hay in options.hay:
        stacks = [write_haystack(model, hay, options, number) for number in range(options.runs)]
        for labelled in policies:
            run = RunOptions(labelled.policy)
            right: dict[str, list[bool]] = {name: [] for name in QUERIES}
            tokens: list[int] = []
            for stack in stacks:
                for name, query in queries_over(stack, options.arity).items():
                    answer = last_answer(engine, query, run)
                    right[name].append(answer.text.partition("\n")[0].strip() == stack.answer)
                    if name == "flat":
                        tokens.append(answer.link.layout.num_tokens)
                    on_run()
            shares = {name: statistics.fmean(values) for name, values in right.items()}
            points.append(TreePoint(labelled.label, hay, statistics.fmean(tokens), shares, options.runs))
    return points


def num_runs(options: TreeOptions, policies: Sequence[LabelledPolicy]) -> int:
    """How often `on_run` is called."""
    return len(options.hay) * len(policies) * options.runs * len(QUERIES)


def queries_over(stack: Haystack, arity: int) -> dict[str, Query]:
    """The three queries."""
    flat = g(plus(*map(fragment, stack.pages)), stack.question, temperature=0, max_tokens=4)
    return {
        "flat": flat,
        "tree": optimise(flat, Options(arity=arity)).after,
        "extract": g(plus(*_copied(stack, arity)), stack.question, temperature=0, max_tokens=4),
    }


def _copied(stack: Haystack, arity: int) -> list[Query]:
    """Each candidate's fact, copied by a call that reads `arity` candidates."""
    copied: list[Query] = []
    for index, (stem, end, question) in enumerate(zip(stack.stems, stack.ends, stack.questions, strict=True)):
        first = index - index % arity
        pages = [fragment(page) for page in stack.pages[first : first + arity]]
        value = g(plus(*pages), question, temperature=0, max_tokens=4)
        copied.append(seq(assistant(f"{_OPENING} {stem}"), value, user(f"{end}\n")))
    return copied


def write_haystack(model: Model, hay: int, options: TreeOptions, number: int) -> Haystack:
    """Candidates about subjects of one kind, told of by one attribute; a function of the options and the number."""
    rng = random.Random(f"hay-{options.seed}-{hay}-{number}")
    kind, attribute = rng.choice(_told_by_words())
    assert not isinstance(attribute.values, str)
    subjects = rng.sample(kind.subjects, options.candidates)
    values = rng.sample(attribute.values, options.candidates)
    pages, stems, ends, questions = [], [], [], []
    for subject, value in zip(subjects, values, strict=True):
        stem, _, end = attribute.statements[0].format(s=subject, v="|").partition(" |")
        before, after = (_hay(model, rng, hay // 2) for _ in range(2))
        pages.append(" ".join(filter(None, [_OPENING, before, f"{stem} {value}{end}", after])) + "\n")
        stems.append(stem)
        ends.append(end)
        question = attribute.question.format(s=subject)
        questions.append(question[0].upper() + question[1:] + "?")
    asked = rng.randrange(options.candidates)
    return Haystack(tuple(pages), tuple(stems), tuple(ends), tuple(questions), asked, values[asked])


def _told_by_words() -> list[tuple[Kind, Attribute]]:
    """Attributes whose values are words, at least 16 of them."""
    return [
        (kind, attribute)
        for kind in ALL_KINDS.values()
        for attribute in kind.attributes
        if not isinstance(attribute.values, str) and len(attribute.values) >= 16
    ]


def _hay(model: Model, rng: random.Random, tokens: int) -> str:
    """Sentences of about so many tokens."""
    sentences: list[str] = []
    while len(model.encode(" ".join(sentences))) < tokens:
        sentences.append(filler(rng))
    return " ".join(sentences)
