"""The synthetic world: short books about made-up towns, companies and people, and questions over them.

A *book* is a run of pages; every page becomes one chunk. A page that is not the last of its book ends by naming the
subject of the next page, which goes on with a pronoun only:

    ... The next page is about Gadwick.
    It holds the Vulry festival. ...

so that a fact of the second page can be attributed only by a model that read the first (kind ``carried``). Many
subjects of one kind share the same attributes within a prompt: matching the attribute alone is a guess. Values are
drawn afresh for every prompt: nothing can be memorised.

Question kinds: ``local`` (subject and fact in one page), ``carried`` (subject in the page before), ``two-hop``
(a fact about the subject names another subject, whose fact is asked too).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.world import names

KINDS = ("local", "carried", "two-hop")


@dataclass(frozen=True)
class Attribute:
    """One relation of a kind of subject: how it is stated, and the question after it."""

    name: str
    statements: tuple[str, ...]  # {s}: the subject or its pronoun, {v}: the value
    question: str  # {s}: the subject
    values: tuple[str, ...] | str  # a list of words, or the kind of subject it points to


@dataclass(frozen=True)
class Kind:
    """A kind of subject and everything that can be said of one."""

    name: str
    subjects: tuple[str, ...]
    pronouns: tuple[str, ...]
    attributes: tuple[Attribute, ...]


TOWN = Kind(
    "town",
    names.TOWNS,
    ("It",),
    (
        Attribute("festival", ("{s} holds the {v} festival.",), "which festival does {s} hold", names.FESTIVALS),
        Attribute("river", ("{s} lies on the river {v}.",), "on which river does {s} lie", names.RIVERS),
        Attribute("soup", ("{s} is known for {v} soup.",), "which soup is {s} known for", names.SOUPS),
        Attribute("mayor", ("{s} has {v} as mayor.",), "who is the mayor of {s}", "person"),
    ),
)
COMPANY = Kind(
    "company",
    names.COMPANIES,
    ("It",),
    (
        Attribute("product", ("{s} makes {v}.",), "what does {s} make", names.PRODUCTS),
        Attribute("flag", ("{s} has a {v} flag.",), "which colour is the flag of {s}", names.COLOURS),
        Attribute("office", ("{s} has an office in {v}.",), "where is the office of {s}", "town"),
        Attribute("founder", ("{s} was founded by {v}.",), "who founded {s}", "person"),
    ),
)
PERSON = Kind(
    "person",
    names.PEOPLE,
    ("He", "She"),
    (
        Attribute("instrument", ("{s} plays the {v}.",), "what does {s} play", names.INSTRUMENTS),
        Attribute("pet", ("{s} keeps a tame {v}.",), "which animal does {s} keep", names.ANIMALS),
        Attribute("study", ("{s} studied {v}.",), "what did {s} study", names.SUBJECTS),
        Attribute("home", ("{s} lives in {v}.",), "where does {s} live", "town"),
    ),
)
ALL_KINDS = {kind.name: kind for kind in (TOWN, COMPANY, PERSON)}


@dataclass(frozen=True)
class World:
    """What books tell of, and in which words.

    Fields:
        casts: the kinds of subjects of one prompt: one or two, so that many subjects share their attributes.
        openings: how a book begins. handovers: how a page names the subject ({s}) of the next.
        filler: subjects, verbs and ends of the sentences that tell no fact.
        anaphor: how the second part of a two-hop question refers to the answer of the first, by its kind ({k}).
        joint: how its parts ({a}, {b}) are joined.
    """

    kinds: tuple[Kind, ...]
    casts: tuple[tuple[Kind, ...], ...]
    openings: tuple[str, ...]
    handovers: tuple[str, ...]
    filler: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    anaphor: str = "this {k}"
    joint: str = "{a}, and {b}?"


BOOKS = World(
    kinds=(TOWN, COMPANY, PERSON),
    casts=((TOWN,), (COMPANY,), (PERSON,), (TOWN, PERSON), (COMPANY, PERSON), (COMPANY, TOWN)),
    openings=("Here begins a new book.", "This is the first page of a book.", "A new book starts here."),
    handovers=("The next page is about {s}.", "Turn the page to read about {s}.", "Now we come to {s}."),
    filler=(
        (
            "the road", "the old bridge", "the harbour", "the market", "a narrow path",
            "the garden", "the morning", "the library", "the weather", "a long wall",
        ),
        (
            "was quiet", "was open to all", "looked much the same", "had been repaired", "was full of light",
            "took a long time", "smelled of rain", "was often described", "was painted twice",
        ),
        (
            "in those years", "before winter", "after the storm", "as travellers wrote",
            "for most of the year", "without any hurry", "as far as anyone knew", "at the end of summer",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """One statement of a prompt; `page` is where it is told and `named_on` where its subject is named."""

    kind: str
    subject: str
    attribute: Attribute
    value: str
    page: int
    named_on: int

    @property
    def is_carried(self) -> bool:
        return self.named_on != self.page


@dataclass(frozen=True)
class Question:
    """A question over the pages of one prompt, and the facts that its answer rests on, in order."""

    text: str
    answer: str
    kind: str
    facts: tuple[Fact, ...]

    @property
    def pages(self) -> tuple[int, ...]:
        """The indices of the pages that the answer rests on."""
        return tuple(sorted({page for fact in self.facts for page in (fact.named_on, fact.page)}))


@dataclass(frozen=True)
class WorldPrompt:
    """Pages (one chunk each, each ends with a newline) and every question that can be asked about them."""

    pages: tuple[str, ...]
    questions: tuple[Question, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class PageShape:
    """How large the pages are: filler words per page, subjects named in a page, facts told per subject."""

    max_filler_sentences: int = 6
    max_locals: int = 2
    max_facts: int = 2


def question_text(query: str) -> str:
    """The tail of the embedded models' prompt for one query."""
    return f"Question: {query}\nAnswer:"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def filler(rng: random.Random, world: World = BOOKS) -> str:
    """A sentence that tells no fact."""
    return _sentence(" ".join(rng.choice(part) for part in world.filler) + ".")


def _book_lengths(rng: random.Random, num_pages: int) -> list[int]:
    lengths: list[int] = []
    while (left := num_pages - sum(lengths)) > 0:
        length = rng.randint(2, 6)
        lengths.append(left if left - length < 2 else length)
    return lengths


class _Writer:
    """Writes one prompt: hands out unused names and values, and keeps the facts told so far."""

    def __init__(self, rng: random.Random, shape: PageShape, world: World) -> None:
        self.rng, self.shape, self.world = rng, shape, world
        self.facts: list[Fact] = []
        self.kinds = rng.choice(world.casts)
        self.unused = {kind.name: rng.sample(kind.subjects, len(kind.subjects)) for kind in world.kinds}
        self.pointed: dict[str, list[str]] = {kind.name: [] for kind in world.kinds}
        self.attributes = {kind.name: rng.sample(kind.attributes, 2) for kind in world.kinds}
        self.values: dict[str, list[str]] = {}

    def subject(self, kind: Kind) -> str:
        """An unused name of this kind; half of the time one that an earlier fact already points to."""
        if self.pointed[kind.name] and self.rng.random() < 0.7:
            return self.pointed[kind.name].pop(self.rng.randrange(len(self.pointed[kind.name])))
        return self.unused[kind.name].pop()

    def value(self, attribute: Attribute) -> str:
        if isinstance(attribute.values, str):
            name = self.unused[attribute.values].pop()
            self.pointed[attribute.values].append(name)
            return name
        left = self.values.setdefault(attribute.name, [])
        if not left:
            left.extend(self.rng.sample(attribute.values, len(attribute.values)))
        return left.pop()

    def tell(self, kind: Kind, subject: str, page: int, named_on: int, pronoun_first: bool) -> str:
        """Two or so facts about `subject`, told in a row; named in the first sentence unless it was named before."""
        sentences = []
        pronoun = kind.pronouns[kind.subjects.index(subject) % len(kind.pronouns)]
        num_facts = self.rng.randint(1, self.shape.max_facts)
        for i, attribute in enumerate(self.rng.sample(self.attributes[kind.name], num_facts)):
            value = self.value(attribute)
            self.facts.append(Fact(kind.name, subject, attribute, value, page, named_on))
            name = pronoun if pronoun_first or i else subject
            sentences.append(self.rng.choice(attribute.statements).format(s=name, v=value))
        return " ".join(sentences)

    def page(self, number: int, carried: tuple[Kind, str] | None, following: str | None) -> str:
        rng, world = self.rng, self.world
        middle = [filler(rng, world) for _ in range(rng.randint(0, self.shape.max_filler_sentences))]
        for _ in range(rng.randint(0 if carried else 1, self.shape.max_locals)):
            kind = rng.choice(self.kinds)
            stated = self.tell(kind, self.subject(kind), number, number, pronoun_first=False)
            middle.insert(rng.randint(0, len(middle)), stated)
        first = self.tell(*carried, number, number - 1, pronoun_first=True) if carried else rng.choice(world.openings)
        last = [rng.choice(world.handovers).format(s=following)] if following else []
        return " ".join([first, *middle, *last]) + "\n"

    def book(self, start: int, length: int) -> Iterator[str]:
        carried: tuple[Kind, str] | None = None
        for i in range(length):
            kind = self.rng.choice(self.kinds)
            following = (kind, self.subject(kind)) if i + 1 < length else None
            yield self.page(start + i, carried, following[1] if following else None)
            carried = following


def _single_hops(facts: Sequence[Fact]) -> Iterator[Question]:
    for fact in facts:
        text = _sentence(fact.attribute.question.format(s=fact.subject)) + "?"
        yield Question(text, fact.value, "carried" if fact.is_carried else "local", (fact,))


def _two_hops(facts: Sequence[Fact], world: World) -> Iterator[Question]:
    by_subject: dict[str, list[Fact]] = {}
    for fact in facts:
        by_subject.setdefault(fact.subject, []).append(fact)
    for first in facts:
        for second in by_subject.get(first.value, []):
            anaphor = world.anaphor.format(k=second.kind)
            parts = first.attribute.question.format(s=first.subject), second.attribute.question.format(s=anaphor)
            text = world.joint.format(a=parts[0], b=parts[1])
            yield Question(_sentence(text), f"{first.value}, {second.value}", "two-hop", (first, second))


def write_prompt(
    rng: random.Random, num_pages: int, shape: PageShape = PageShape(), world: World = BOOKS
) -> WorldPrompt:
    """One prompt of `num_pages` pages with all its questions; a deterministic function of the state of `rng`."""
    writer = _Writer(rng, shape, world)
    pages: list[str] = []
    for length in _book_lengths(rng, num_pages):
        pages.extend(writer.book(len(pages), length))
    questions = [*_single_hops(writer.facts), *_two_hops(writer.facts, world)]
    rng.shuffle(questions)
    return WorldPrompt(tuple(pages), tuple(questions), tuple(writer.facts))
