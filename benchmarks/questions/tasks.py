"""The tasks of picbench: what each puts into its documents, what it asks, and what is right.

A task is a function of a `Draw` and the number of documents. Sentences are plain English; each fact is stated once, and
filler (`Draw.filler`, `Draw.code`) names nothing that a question asks for.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

FIRST_NAMES = (
    "Ada Bruno Carla Dario Elena Felix Greta Hugo Ines Jonas Karin Leo Mara Nils Olga Pavel Rosa Samir Tessa Viktor"
)
_LAST = "Adler Bishop Carver Dunn Ekman Fischer Grant Holm Ivarsson Jensen Keller Lind Moreau Novak Orsini Petrov Quinn"
_TOWNS = "Aldport Bexley Corvale Dunmere Eastholm Farwick Glenrock Harlow Kelby Lorne Marston Norwell Oakford Penrith"
_PLACES = (
    "archive bakery cannery depot ferry gallery hospital library market museum observatory pharmacy school theatre"
)
_ITEMS = (
    "barrels blankets candles carpets clocks compasses kettles lamps ledgers mirrors pumps ropes saddles telescopes"
)
_MONTHS = "January February March April May June July August September October November December"
_FILLER = (
    ("The road to the coast", "The old bridge", "The weather", "The morning train", "The town band", "The garden"),
    ("was discussed at length", "was mentioned again", "kept everybody busy", "surprised nobody", "came up once more"),
    ("before lunch", "during the week", "in the evening", "without any result", "as in other years", "for a while"),
)  # fmt: skip


class Draw:
    """Random names, numbers and texts of one case; nothing that identifies a fact comes twice."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self._used = set[str]()

    def _new(self, make: Callable[[], str]) -> str:
        while (text := make()) in self._used:
            pass
        self._used.add(text)
        return text

    def person(self) -> str:
        return self._new(lambda: f"{self.word(FIRST_NAMES)} {self.word(_LAST)}")

    def place(self) -> str:
        """A house of a town: "the Lorne museum"."""
        return self._new(lambda: f"the {self.word(_TOWNS)} {self.word(_PLACES)}")

    def number(self, digits: int = 5) -> str:
        return self._new(lambda: str(self.random.randrange(10 ** (digits - 1), 10**digits)))

    def label(self, prefix: str) -> str:
        """An identifier: "INV-482"."""
        return self._new(lambda: f"{prefix}{self.random.randrange(100, 1000)}")

    def date(self) -> str:
        return f"{self.random.randrange(1, 29)} {self.word(_MONTHS)}"

    def word(self, words: str) -> str:
        return self.random.choice(words.split())

    def items(self, count: int) -> list[str]:
        return self.random.sample(_ITEMS.split(), count)

    def filler(self) -> str:
        return " ".join(self.random.choice(part) for part in _FILLER) + "."

    def code(self) -> str:
        """A function that no question is about."""
        return f"def {self.label('helper_')}(value):\n    return value + {self.random.randrange(2, 90)}"


@dataclass(frozen=True)
class Draft:
    """A case before its documents are filled up.

    Fields:
        facts: [documents] sentences, in order, with filler around them.
        first, last: by document, the sentence that it begins or ends with.
        is_code: facts and filler are lines of code, the facts at the end.
    """

    facts: Sequence[Sequence[str]]
    query: str
    answers: tuple[str, ...]
    metric: str = "contains"
    max_new_tokens: int = 16
    first: Mapping[int, str] = field(default_factory=dict)
    last: Mapping[int, str] = field(default_factory=dict)
    is_code: bool = False


def spread(draw: Draw, facts: Sequence[str], count: int) -> list[list[str]]:
    """Facts over documents at random; their order is kept."""
    places = sorted(draw.random.randrange(count) for _ in facts)
    return [[fact for fact, place in zip(facts, places, strict=True) if place == i] for i in range(count)]


def keys(draw: Draw, count: int) -> Draft:
    """A key of each document has a value; one is asked for (RULER, multi-key)."""
    codes = {draw.person(): draw.number() for _ in range(count)}
    who = draw.random.choice(list(codes))
    facts = [[f"The access code of {person} is {code}."] for person, code in codes.items()]
    return Draft(facts, f"What is the access code of {who}? Answer with the number only.", (codes[who],))


def values(draw: Draw, count: int) -> Draft:
    """A key has several values in several documents; all are asked for (RULER, multi-value)."""
    who, other = draw.person(), draw.person()
    codes = [draw.number() for _ in range(min(3, count))]
    lines = [f"{who} rented the locker {code}." for code in codes]
    facts = spread(draw, [*lines, f"{other} rented the locker {draw.number()}."], count)
    query = f"Which lockers did {who} rent? Answer with their numbers, separated by commas."
    return Draft(facts, query, (", ".join(codes),), "f1", 24)


def continued(draw: Draw, count: int) -> Draft:
    """A fact begins at the end of a document and goes on in the next."""
    people, spots = [draw.person() for _ in range(count - 1)], [draw.place() for _ in range(count - 1)]
    chosen = draw.random.randrange(count - 1)
    last = {i: f"The key of {spot} was given to the person who is named first in the next document." for i, spot in
            enumerate(spots)}  # fmt: skip
    first = {i + 1: f"{person} arrived yesterday." for i, person in enumerate(people)}
    query = f"Who was given the key of {spots[chosen]}? Answer with the name only."
    return Draft([[]] * count, query, (people[chosen],), first=first, last=last)


def two_hops(draw: Draw, count: int) -> Draft:
    """Who works where is in one document, what that place has in another."""
    pairs = [(draw.person(), draw.place(), draw.number()) for _ in range(max(1, count // 2))]
    facts: list[list[str]] = [[] for _ in range(count)]
    for who, where, phone in pairs:
        one, two = draw.random.sample(range(count), 2)
        facts[one].append(f"{who} works at {where}.")
        facts[two].append(f"The telephone number of {where} is {phone}.")
    who, _, phone = draw.random.choice(pairs)
    query = f"Which telephone number does the place have where {who} works? Answer with the number only."
    return Draft(facts, query, (phone,))


def variables(draw: Draw, count: int) -> Draft:
    """A value is handed on from variable to variable, over the documents (RULER, variable tracking)."""
    chains = [[draw.label("X") for _ in range(4)] for _ in range(2)]
    numbers = [draw.number() for _ in chains]
    facts: list[list[str]] = [[] for _ in range(count)]
    for chain, number in zip(chains, numbers, strict=True):
        steps = [f"Let {chain[0]} be {number}."]
        steps += [f"Let {name} be equal to {before}." for before, name in itertools.pairwise(chain)]
        for at, lines in enumerate(spread(draw, steps, count)):
            facts[at] += lines
    return Draft(facts, f"Which number is {chains[0][-1]}? Answer with the number only.", (numbers[0],))


def counting(draw: Draw, count: int) -> Draft:
    """How often something happened, over all documents."""
    who, other = draw.person(), draw.person()
    times = draw.random.randrange(2, 2 + count)
    lines = [f"{who} signed for a delivery of {draw.word(_ITEMS)}." for _ in range(times)]
    lines += [f"{other} signed for a delivery of {draw.word(_ITEMS)}." for _ in range(count // 2)]
    draw.random.shuffle(lines)
    query = f"How many deliveries did {who} sign for in all documents together? Answer with the number only."
    return Draft(spread(draw, lines, count), query, (str(times),), "em", 8)


def common_words(draw: Draw, count: int) -> Draft:
    """Which goods the documents name most often (RULER, common words)."""
    items = draw.items(8)
    often, lines = items[:2], list[str]()
    for item in items:
        lines += [f"One crate of {item} came in."] * (2 * count if item in often else max(1, count // 2))
    draw.random.shuffle(lines)
    query = "Of which two goods did most crates come in? Answer with their names, separated by a comma."
    return Draft(spread(draw, lines, count), query, (", ".join(often),), "f1", 16)


def versions(draw: Draw, count: int) -> Draft:
    """Documents contradict each other; the later one is right."""
    who, other = draw.person(), draw.person()
    rooms = [draw.number(3) for _ in range(min(3, count))]
    lines = [f"{who} sits in room {room}." for room in rooms]
    facts = spread(draw, [*lines, f"{other} sits in room {draw.number(3)}."], count)
    query = (
        f"Where documents disagree, the later one is right. In which room does {who} sit? Answer with the number only."
    )
    return Draft(facts, query, (rooms[-1],))


def choice(draw: Draw, count: int) -> Draft:
    """A judge among candidates: one of the offers meets all conditions."""
    limit, right = draw.random.randrange(300, 900), draw.random.randrange(count)
    names, facts = [draw.person() for _ in range(count)], list[list[str]]()
    for i, name in enumerate(names):
        wrong = draw.random.choice(("price", "time")) if i != right else ""
        price = limit + draw.random.randrange(10, 99) if wrong == "price" else limit - draw.random.randrange(10, 99)
        weeks = draw.random.randrange(5, 9) if wrong == "time" else draw.random.randrange(2, 5)
        facts.append([f"{name} offers to do the work for {price} euros.", f"The work would take {weeks} weeks."])
    query = (
        f"Each document is an offer. Which one costs at most {limit} euros and takes at most 4 weeks? Answer with the "
        "name of the person only."
    )
    return Draft(facts, query, (names[right],))


def json_object(draw: Draw, count: int) -> Draft:
    """An object in JSON whose values are copied from a document."""
    invoices = [(draw.label("INV-"), draw.person(), draw.date(), draw.number(4)) for _ in range(count)]
    facts = [
        [f"Invoice {name} was sent to {who}.", f"The sum of {amount} euros is due on {date}."]
        for name, who, date, amount in invoices
    ]
    name, who, date, amount = draw.random.choice(invoices)
    query = (
        f'Write invoice {name} as JSON and nothing else: {{"customer": name, "due": date as written, "euros": number}}.'
    )
    return Draft(facts, query, (json.dumps({"customer": who, "due": date, "euros": int(amount)}),), "json", 48)


def tool_call(draw: Draw, count: int) -> Draft:
    """A call of a tool whose arguments are copied from two documents."""
    people = [(draw.person(), draw.place(), draw.number(4)) for _ in range(count)]
    facts: list[list[str]] = [[f"{who} wants to be met at {where}."] for who, where, _ in people]
    for shift, (who, _, number) in enumerate(people):
        facts[(shift + 1) % count].append(f"{who} has the customer number {number}.")
    who, where, number = draw.random.choice(people)
    query = (
        f"Arrange the meeting that {who} wants. Answer with one call as JSON and nothing else: "
        '{"name": "arrange", "arguments": {"customer_number": number, "place": place as written}}.'
    )
    call = {"name": "arrange", "arguments": {"customer_number": int(number), "place": where}}
    return Draft(facts, query, (json.dumps(call),), "json", 64)


def code(draw: Draw, count: int) -> Draft:
    """Constants are defined in some files and used in others."""
    names = [f"module_{draw.number(3)}" for _ in range(count)]
    constants = [draw.label("LIMIT_") for _ in range(count)]
    numbers = [draw.number(4) for _ in range(count)]
    facts = []
    for i, (name, constant) in enumerate(zip(names, constants, strict=True)):
        file, used = names[i - 1], constants[i - 1]
        facts.append([
            f"# file {name}.py", f"{constant} = {numbers[i]}",
            f"from {file} import {used}\n\ndef limit_of_{name}():\n    return {used}",
        ])  # fmt: skip
    chosen = draw.random.randrange(count)
    query = f"What does limit_of_{names[chosen]}() return? Answer with the number only."
    return Draft(facts, query, (numbers[chosen - 1],), is_code=True)


TASKS: Mapping[str, Callable[[Draw, int], Draft]] = {
    "keys": keys, "values": values, "continued": continued, "two-hops": two_hops, "variables": variables,
    "counting": counting, "common-words": common_words, "versions": versions, "order": keys, "choice": choice,
    "json": json_object, "tool": tool_call, "code": code,
}  # fmt: skip
