"""Prompts of texts that people wrote, and the tasks that are planted in them."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import Distribution, distributions
from itertools import islice, zip_longest
from pathlib import Path
from typing import TypeVar

from pictool import Model

CHOICE_SEED = 7  # policies were chosen by its prompts; every other seed draws from the other half of the documents
CHUNKS = 8  # of a prompt
PIECE, PASSAGE, LONG = 160, 180, 480  # tokens
MODULES = "textwrap shutil json.decoder statistics bisect heapq fnmatch posixpath shlex calendar ast tokenize".split()
FIELDS = ("Version", "License", "Requires-Python", "Home-page", "Summary")
NAMES = (
    "Marlow Lenna Arden Fenwick Haldis Corvo Tamsin Ostrava Brindle Quillon Selwyn Dorrit Pellam Virel Ashby".split()
)
THINGS = (
    "red lamp,blue boat,old clock,iron gate,green bicycle,stone bridge,silver kettle,wooden chest,black piano,"
    "yellow tent,glass tower,copper bell,paper mask,small organ,broken chair"
).split(",")
PLACES = "harbour market station mill museum garden chapel library bakery castle".split()
DAYS = "Monday Tuesday Wednesday Friday Sunday".split()

_T = TypeVar("_T")


@dataclass(frozen=True)
class Question:
    """A prompt: documents, and a question about them.

    Fields:
        follows: each document goes on where the one before it ends.
        gold: the text that a right answer has, if one is known.
        begin: how the answer begins; the model goes on from there.
    """

    kind: str
    documents: tuple[str, ...]
    query: str
    gold: str = ""
    begin: str = ""
    follows: bool = False

    @property
    def id(self) -> str:
        return sha256("\0".join((*self.documents, self.query)).encode()).hexdigest()[:12]


class Texts:
    """Texts cut by a model's tokenizer."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def pieces(self, text: str, size: int) -> list[str]:
        """Consecutive pieces of `size` tokens each; what is left over is dropped."""
        ids = self._model.encode(text)
        return [self._model.tokenizer.decode(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]

    def around(self, text: str, at: int, size: int, draw: random.Random) -> str:
        """About `size` tokens of a text around a character."""
        ids, before = self._model.encode(text), len(self._model.encode(text[:at]))
        start = max(0, min(before - draw.randrange(20, size - 30), len(ids) - size))
        return str(self._model.tokenizer.decode(ids[start : start + size])).strip() + "\n"

    def length(self, text: str) -> int:
        return len(self._model.encode(text))


def make_questions(model: Model, kinds: Sequence[str], musique: Path | None, count: int, seed: int) -> list[Question]:
    """All prompts, kinds in turn, so that a run that is ended early has some of each.

    Args:
        musique: the file of passages; without it there are no `passages` and `long`.
        count: prompts of `passages`, `pieces` and `tasks`; of the others half as many.
    """
    texts, fewer = Texts(model), (count + 1) // 2
    makers: dict[str, Callable[[], list[Question]]] = {
        "pieces": lambda: pieces(texts, "pieces", PIECE, count, seed),
        "chapters": lambda: pieces(texts, "chapters", LONG, fewer, seed),
        "code": lambda: code(texts, fewer, seed),
        "records": lambda: records(texts, fewer, seed),
        "tasks": lambda: tasks(texts, count, seed),
    }
    if musique is not None:
        makers["passages"] = lambda: passages(musique, "passages", PASSAGE, texts, count, seed)
        makers["long"] = lambda: passages(musique, "long", LONG, texts, fewer, seed)
    turns = zip_longest(*(makers[kind]() for kind in kinds if kind in makers))
    return [question for turn in turns for question in turn if question is not None]


def half(found: Sequence[_T], seed: int) -> Sequence[_T]:
    """The half of the documents that a seed draws from: the first for prompts that policies were chosen by."""
    middle = len(found) // 2
    return found[:middle] if seed == CHOICE_SEED else found[middle:]


def among(kind: str, pool: Sequence[tuple[str, str, str]], count: int, draw: random.Random) -> list[Question]:
    """Questions (document, query, gold), each with its document among seven others at a random place.

    They share few documents, which are compiled once.
    """
    pool = draw.sample(pool, min(len(pool), max(count, CHUNKS) + 4))
    questions = []
    for document, query, gold in pool[:count]:
        others = draw.sample([other for other, _, _ in pool if other != document], CHUNKS - 1)
        others.insert(draw.randrange(CHUNKS), document)
        questions.append(Question(kind, tuple(others), query, gold))
    return questions


def passages(path: Path, kind: str, size: int, texts: Texts, count: int, seed: int) -> list[Question]:
    """Passages of MuSiQue's contexts that have the answer."""
    draw = random.Random(seed)
    listed = list(half(json.loads(path.read_text(encoding="utf-8")), seed))
    draw.shuffle(listed)

    def found() -> Iterator[tuple[str, str, str]]:
        for record in listed:
            gold, query = record["answers"][0], f"{record['question']} Answer in a few words."
            for context in record["ctxs"]:
                if (at := context["text"].lower().find(" " + gold.lower())) >= 0:
                    passage = texts.around(context["text"], at, size, draw)
                    if gold.lower() in passage.lower():
                        yield passage, query, gold
                        break

    return among(kind, list(islice(found(), max(count, CHUNKS) + 4)), count, draw)


def pieces(texts: Texts, kind: str, size: int, count: int, seed: int) -> list[Question]:
    """Consecutive pieces of the longest descriptions of packages: the end of a sentence, and a summary."""
    draw, windows = random.Random(seed), []
    for text in half([text for text in descriptions() if len(text) > 9000], seed):
        cut = texts.pieces(text, size)
        windows += [tuple(cut[at : at + CHUNKS]) for at in range(0, min(len(cut) - CHUNKS + 1, 3 * CHUNKS), CHUNKS)]
    draw.shuffle(windows)
    questions = []
    for window in windows:
        if (quoted := sentence(window, draw)) is not None:
            query = f'The text contains a sentence that begins "{quoted[0]}". Write the rest of that sentence.'
            questions.append(Question(kind, window, query, quoted[1], follows=True))
        questions.append(Question(kind, window, "Summarise this text in one sentence.", follows=True))
    return questions[:count]


@cache
def packages() -> tuple[Distribution, ...]:
    """Installed packages by name."""
    return tuple(sorted(distributions(), key=lambda each: str(each.metadata["Name"]).lower()))


@cache
def descriptions() -> tuple[str, ...]:
    """Descriptions of installed packages, without badges and links."""
    found = []
    for each in packages():
        text = (each.read_text("METADATA") or "").partition("\n\n")[2]
        found.append(re.sub(r"\[?!\[[^\]]*\]\([^)]*\)|https?://\S+", "", text))
    return tuple(text for text in found if text.isascii())


def sentence(window: Sequence[str], draw: random.Random) -> tuple[str, str] | None:
    """The first part of some sentence, and the rest."""
    listed = [
        words
        for piece in window
        for words in map(str.split, re.split(r"(?<=[.!?])\s+", " ".join(piece.split()))[1:-1])
        if 12 <= len(words) <= 40
    ]
    if not listed:
        return None
    words = draw.choice(listed)
    cut = len(words) * 6 // 10
    return " ".join(words[:cut]), " ".join(words[cut:])


@cache
def functions() -> tuple[tuple[str, str, str], ...]:
    """Module, name and source of the functions of Python's library."""
    found = []
    for module in MODULES:
        source = inspect.getsource(import_module(module))
        listed = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        found += [(module, node.name, ast.get_source_segment(source, node) or "") for node in listed]
    return tuple(found)


def code(texts: Texts, count: int, seed: int) -> list[Question]:
    """Functions of Python's library."""
    pool = [
        (f"# {module}.py\n{body}\n\n", f"What does the function {name} do?", "")
        for module, name, body in functions()
        if 100 <= texts.length(body) <= 260
    ]
    return among("code", half(pool, seed), count, random.Random(seed))


def records(texts: Texts, count: int, seed: int) -> list[Question]:
    """Metadata of installed packages as results of a tool."""
    draw, pool = random.Random(seed), []
    for each in packages():
        metadata = each.metadata  # is read anew each time
        known = {name: str(metadata[name]) for name in ("Name", *FIELDS) if name in metadata}
        requires = [name for name in (each.requires or ()) if "extra" not in name][:8]
        record = json.dumps({"tool": "package", "result": known | {"Requires": requires}}, indent=1) + "\n"
        fields = [name for name in FIELDS if name in known and len(known[name]) < 60]
        if fields and 60 <= texts.length(record) <= 400:
            field = draw.choice(fields)
            query = f'What is the "{field}" of the package {known["Name"]}? Answer with the value only.'
            pool.append((record, query, known[field]))
    return among("records", half(pool, seed), count, draw)


def tasks(texts: Texts, count: int, seed: int) -> list[Question]:
    """Find, copy and quote a sentence that was put into a real text; the first words of the answer are given.

    SmolLM2-135M does these under full recompute in more than four cases of five, and without the first words in one of
    five. It cannot count: asked how many people own a thing that one or two documents mention, it says "unknown".
    """
    draw = random.Random(seed)
    names, things = draw.sample(NAMES, len(NAMES)), draw.sample(THINGS, len(NAMES))
    prose = iter(draw.sample(half(paragraphs(texts), seed), 2 * len(NAMES)))
    pool = []
    for number, (name, thing) in enumerate(zip(names, things, strict=True)):
        begin, rest, query = planted(number, name, thing, draw)
        pool.append((f"{next(prose)} {begin}{rest} {next(prose)}\n\n", query, rest, begin.rstrip()))
    questions = []
    for number in range(count):
        document, query, gold, begin = pool[number % len(pool)]
        other_tasks = [other for other, query_, *_ in pool if query_.split()[:2] != query.split()[:2]]
        others = draw.sample(other_tasks, CHUNKS - 1)
        others.insert(draw.randrange(CHUNKS), document)
        questions.append(Question("tasks", tuple(others), query, gold, begin))
    return questions


def planted(number: int, name: str, thing: str, draw: random.Random) -> tuple[str, str, str]:
    """A sentence's first words, its rest, and what asks for it."""
    place, day = draw.choice(PLACES), draw.choice(DAYS)
    return (
        (f"The number of the {thing} is ", f"{draw.randrange(1000, 10000)}.", f"What is the number of the {thing}?"),
        (f"{name} keeps the spare key in the ", f"{place}.", f"Where does {name} keep the spare key?"),
        (f"Note from {name}: ", f"the {thing} was moved to the {place} on {day}.",
         f'Repeat the sentence that begins with "Note from {name}".'),
        (f'{name} said: "', f'The {thing} is in the {place}."', f"What did {name} say? Quote it."),
    )[number % 4]  # fmt: skip


def paragraphs(texts: Texts) -> list[str]:
    """Paragraphs of prose of packages' descriptions."""
    found = [" ".join(part.split()) for text in descriptions() for part in re.split(r"\n\s*\n", text)]
    is_prose = re.compile(r"[A-Z][\w ,.;:'()\"`-]+[.]")
    return sorted({part for part in found if is_prose.fullmatch(part) and 35 <= texts.length(part) <= 90})
