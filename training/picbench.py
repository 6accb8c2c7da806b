"""Prompts of picbench as training data: documents, many questions after them, and where every answer is.

Documents are made by picbench's own code, of one task or of several at once. What their sentences say is read back, so
that every person, place and name is asked about, and not only the drafted one. A prompt is that of picbench.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.questions import picbench
from benchmarks.questions.tasks import FIRST_NAMES, TASKS, Draft, Draw
from training.data import Batch, Columns, Encoder, lay_out
from training.tokenizer import SPECIALS
from training.world.generate import question_text

Span = tuple[int, int]  # [start, end) of characters

_WHO, _HOUSE = r"([A-Z][a-z]+ [A-Z][a-z]+)", r"the (\w+ \w+)"
# What sentences say, by task: a pattern's first group is a subject, the others are what is said of it.
SENTENCES: Mapping[str, tuple[str, ...]] = {
    "keys": (rf"access code of {_WHO} is (\d+)",),
    "order": (rf"access code of {_WHO} is (\d+)",),
    "values": (rf"{_WHO} rented the locker (\d+)",),
    "continued": (rf"key of {_HOUSE} was given to the person who is named first in the next document\.\n{_WHO}",),
    "two-hops": (rf"{_WHO} works at {_HOUSE}", rf"telephone number of {_HOUSE} is (\d+)"),
    "variables": (r"Let X(\d+) be (?:equal to X)?(\d+)",),
    "counting": (rf"{_WHO} signed for a delivery of (\w+)",),
    "versions": (rf"{_WHO} sits in room (\d+)",),
    "choice": (rf"{_WHO} offers to do the work for (\d+) euros",),
    "json": (rf"Invoice INV-(\d+) was sent to {_WHO}\.[^\n]*?The sum of (\d+) euros is due on (\d+ \w+)",),
    "tool": (rf"{_WHO} wants to be met at {_HOUSE}", rf"{_WHO} has the customer number (\d+)"),
    "code": (r"limit_of_module_(\d+)\(\):\n    return LIMIT_(\d+)", r"LIMIT_(\d+) = (\d+)"),
}


@dataclass(frozen=True)
class Question:
    """A question, where its answer's parts are in the documents' text, and by what the query names its subject.

    Fields:
        bridge: what the documents say of the subject, if that is what the answer is said of.
    """

    task: str
    query: str
    answer: str
    is_drafted: bool = True
    subject: str = ""
    copied: tuple[Span, ...] = ()
    bridge: Span | None = None


@dataclass(frozen=True)
class Prompt:
    """Documents, what is asked about them, and the (subject, value) places in their text."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    places: tuple[tuple[Span, Span], ...]


def write(draw: Draw, tasks: Sequence[str], count: int, words: int) -> Prompt:
    """A prompt as picbench's cases are; of one task: that of the case with the same seed."""
    drafts = [TASKS[task](draw, count) for task in tasks]
    merged = _merged(draw.random, drafts)
    documents = tuple(picbench.document(draw, merged, number, words) for number in range(count))
    text = "".join(documents)
    asked = [question for task, draft in zip(tasks, drafts, strict=True) for question in _asked(task, draft, text)]
    matches = [match for task in tasks for p in SENTENCES.get(task, ()) for match in re.finditer(p, text)]
    places = [(match.span(1), match.span(group)) for match in matches for group in range(2, 1 + len(match.groups()))]
    return Prompt(documents, tuple(asked), tuple(places))


def _merged(rng: random.Random, drafts: Sequence[Draft]) -> Draft:
    """The facts of all drafts in one, in a random order that keeps each draft's."""
    if len(drafts) == 1:
        return drafts[0]
    facts = []
    for parts in zip(*(draft.facts for draft in drafts), strict=True):
        order = [i for i, part in enumerate(parts) for _ in part]
        rng.shuffle(order)
        sources = [iter(part) for part in parts]
        facts.append([next(sources[i]) for i in order])
    bounds = next((draft for draft in drafts if draft.first), drafts[0])
    return replace(bounds, facts=facts)


def _asked(task: str, draft: Draft, text: str) -> Iterator[Question]:
    """The draft's question, and the same of every other subject of its task."""
    said = [_said(pattern, text) for pattern in SENTENCES.get(task, ())]
    if task in ("choice", "common-words"):  # what is asked is not of one subject
        where = text.find(f"{draft.answers[0]} offers")
        named = ((where, where + len(draft.answers[0])),) if task == "choice" else ()
        yield Question(task, draft.query, draft.answers[0], copied=named)
        return
    drafted = next(subject for subject in said[0] if subject in draft.query)
    for subject in said[0]:
        copied, bridge = _found(task, subject, said, text)
        query = draft.query.replace(drafted, subject)
        answer = _answer(task, [text[start:end] for start, end in copied])
        yield Question(task, query, answer, subject == drafted, subject, () if task == "counting" else copied, bridge)


def _said(pattern: str, text: str) -> dict[str, tuple[Span, ...]]:
    said: dict[str, tuple[Span, ...]] = {}
    for match in re.finditer(pattern, text):
        said[match[1]] = said.get(match[1], ()) + tuple(map(match.span, range(2, 1 + len(match.groups()))))
    return said


def _found(
    task: str, subject: str, said: Sequence[Mapping[str, tuple[Span, ...]]], text: str
) -> tuple[tuple[Span, ...], Span | None]:
    """Where what is asked of a subject is, and over what it was found."""
    spans, last = said[0][subject], said[-1]
    if task == "tool":
        return spans + last[subject], None
    if task == "versions":
        return spans[-1:], None
    bridge = None
    if task in ("two-hops", "code", "variables"):
        while (name := text[slice(*spans[0])]) in last:
            bridge, spans = bridge or spans[0], last[name]
    return spans, bridge


def _answer(task: str, parts: Sequence[str]) -> str:
    if task == "json":
        return json.dumps({"customer": parts[0], "due": parts[2], "euros": int(parts[1])})
    if task == "tool":
        arguments = {"customer_number": int(parts[1]), "place": f"the {parts[0]}"}
        return json.dumps({"name": "arrange", "arguments": arguments})
    return str(len(parts)) if task == "counting" else ", ".join(parts)


def make_tokenizer() -> Tokenizer:
    """Words of picbench are one token each, numbers one for every two digits; all else is bytes.

    First names have no space before them in their tokens, as numbers: the same token is in a sentence and in JSON.
    """
    names = "|".join(FIRST_NAMES.split())
    pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(rf"\d{{1,2}}|{names}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    words: dict[str, int] = {}
    for index in range(600):
        task = list(TASKS)[index % len(TASKS)]
        prompt = write(Draw(f"tokenizer-{index}"), [task], 4, 50)
        for text in (*prompt.documents, *(question_text(q.query) + f" {q.answer}" for q in prompt.questions)):
            words |= {word: 0 for word, _ in pre_tokenizer.pre_tokenize_str(text) if not word.isdigit()}
    digits = [f"{n:02}" for n in range(100)]
    listed = dict.fromkeys([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *digits, *sorted(words)])
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(listed)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text and the characters at which each ends."""

    ids: list[int]
    ends: list[int]

    def within(self, span: Span) -> range:
        return range(bisect_right(self.ends, span[0]), bisect_right(self.ends, span[1]))

    def of(self, part: str, text: str) -> range:
        start = text.find(part)
        return self.within((start, start + len(part))) if part and start >= 0 else range(0)


class PicbenchEncoder(Encoder):
    """Turns prompts of picbench into batches."""

    kinds = tuple(TASKS)

    def __init__(self) -> None:
        super().__init__(make_tokenizer())

    def tokens(self, *texts: str) -> Tokens:
        """Texts that are tokenized each on its own."""
        ids, ends, start = list[int](), list[int](), 0
        for text in texts:
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            ids += encoded.ids
            ends += [start + end for _, end in encoded.offsets]
            start += len(text)
        return Tokens(ids, ends)

    def lay_out(self, prompts: Sequence[Prompt], has_bos: Sequence[bool]) -> Batch:
        docs = [self.tokens(*prompt.documents) for prompt in prompts]
        docs = [
            Tokens([self.bos] * bos + doc.ids, [0] * bos + doc.ends) for doc, bos in zip(docs, has_bos, strict=True)
        ]
        subjects = [
            [(v, s) for subject, value in prompt.places for v in doc.within(value) for s in doc.within(subject)]
            for doc, prompt in zip(docs, prompts, strict=True)
        ]
        columns = [self.after(doc, prompt) for doc, prompt in zip(docs, prompts, strict=True)]
        return lay_out([doc.ids for doc in docs], subjects, columns)

    def after(self, docs: Tokens, prompt: Prompt) -> Columns:
        """The questions after a prompt's documents, and where every token of an answer comes from."""
        out, text = Columns(), "".join(prompt.documents)
        for block, question in enumerate(prompt.questions, 1):
            asks, start = question_text(question.query), len(out.tokens)
            ask, answer = self.tokens(asks), self.tokens(f" {question.answer}")
            for span in question.copied:
                copies = answer.of(text[slice(*span)], f" {question.answer}")
                for at, source in zip(copies, docs.within(span), strict=True):
                    row = start + len(ask.ids) + at - 1
                    out.sources.append((row, source))
                    out.asked += [(row, start + subject) for subject in ask.of(question.subject, asks)]
                    out.bridges += [(row, bridge) for bridge in docs.within(question.bridge or (0, 0))]
            length = len(ask.ids) + len(answer.ids) + 1
            out.tokens += [*ask.ids, *answer.ids, self.eos]
            out.positions += range(len(docs.ids), len(docs.ids) + length)
            out.blocks += [block] * length
            out.kinds += [-1] * len(ask.ids) + [self.kinds.index(question.task)] * (len(answer.ids) + 1)
        return out
