"""The questions on which policies are measured."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.compiler.chunking import make_chunks, read_text
from pictool.documents.ranking import TextIndex
from pictool.errors import InputError
from pictool.eval.cases import SpecOptions, group_cases
from pictool.eval.datasets import datasets, open_dataset
from pictool.eval.datasets.base import Case, Dataset
from pictool.eval.datasets.records import Record, first_record, read_records

if TYPE_CHECKING:
    from pictool.runtime.model import Model

NEW_TOKENS = 16  # of an answer, where nobody says how long answers are
_ROOM = 192  # tokens that a prompt of documents leaves for its question, its template and the answer


@dataclass(frozen=True)
class Questions(Dataset):
    """Cases whose order does not matter, drawn at random.

    Fields:
        origin: what the questions are, for a sentence: "questions of FILE".
        listed: the cases; those of one unit follow each other. A case without answers is compared with `full`'s answer.
        units: of every case, the number of its unit, from 0 on; units are independent of each other.
    """

    name: ClassVar[str] = "tune"
    reference: ClassVar[str] = "docs/reference/evaluation.md"
    origin: str
    listed: tuple[Case, ...]
    units: tuple[int, ...]

    @property
    def params(self) -> dict[str, Any]:
        return {"questions": self.origin, "cases": len(self.listed)}

    @property
    def num_units(self) -> int:
        return self.units[-1] + 1 if self.units else 0

    @property
    def has_answers(self) -> bool:
        return all(case.answers for case in self.listed)

    def cases_of(self, units: int) -> int:
        """How many cases the first so many units have."""
        return sum(unit < units for unit in self.units)

    def cases(self) -> Iterator[Case]:
        yield from self.listed


def draw(origin: str, cases: Sequence[Case], limit: int) -> Questions:
    """Up to `limit` cases in a random order.

    Cases over the same documents make a unit, unless all are over the same ones: then the documents are what the
    claim is about, and every question is a unit.
    """
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(case.documents, []).append(case)
    units = list(groups.values()) if len(groups) > 1 else [[case] for case in cases]
    random.Random("tune 0").shuffle(units)
    listed = [(number, case) for number, unit in enumerate(units) for case in unit][:limit]
    return Questions(origin, tuple(case for _, case in listed), tuple(number for number, _ in listed))


@dataclass(frozen=True)
class Corpus:
    """The documents that questions are about, and how many of them a prompt has.

    Fields:
        sources: the file that each of `texts` is from. sizes: their tokens.
        per_prompt: documents of a prompt at most. room: tokens of a prompt for its documents.
    """

    texts: tuple[str, ...]
    sources: tuple[str, ...]
    sizes: tuple[int, ...]
    per_prompt: int
    room: int

    @cached_property
    def _index(self) -> TextIndex:
        return TextIndex(self.texts)

    def documents_of(self, record: Record) -> tuple[str, ...]:
        """The documents of a question: the `files` that its record names; else all, or the best by BM25.

        Raises:
            InputError: a file that is not among the documents, or no document that fits.
        """
        if record.values.get("files") is not None:
            return tuple(text for name in record.texts("files") for text in self._texts_of(record, name))
        if len(self.texts) <= self.per_prompt and sum(self.sizes) <= self.room:
            return self.texts
        chosen, room = list[int](), self.room
        for index in self._index.ranked(record.text("query")):
            if len(chosen) < self.per_prompt and self.sizes[index] <= room:
                chosen.append(index)
                room -= self.sizes[index]
        if not chosen:
            raise record.error("none of the documents fits the model; cut them with --chunk-tokens")
        return tuple(self.texts[index] for index in chosen)

    def _texts_of(self, record: Record, name: str) -> list[str]:
        paths = {Path(name).resolve(), (record.path.parent / name).resolve()}
        found = [
            text for source, text in zip(self.sources, self.texts, strict=True) if Path(source).resolve() in paths
        ]  # fmt: skip
        if not found:
            raise record.key_error(
                "files", f"names {name}, which is not among the documents; list it before --questions"
            )
        return found


def read_corpus(model: Model, names: Sequence[str], chunk_tokens: int | None, per_prompt: int) -> Corpus:
    """The texts of files, cut if asked. Raises InputError: no text, or too long for the model."""
    pieces = [
        (name, chunk) for name in names for chunk in make_chunks(model, read_text(Path(name)), name, chunk_tokens)
    ]  # fmt: skip
    apart = len(model.encode(model.separator))
    return Corpus(
        tuple(chunk.text for _, chunk in pieces), tuple(name for name, _ in pieces),
        tuple(len(chunk) + apart for _, chunk in pieces), per_prompt, model.max_positions - _ROOM,
    )  # fmt: skip


def questions_of_file(name: str, corpus: Corpus, limit: int) -> Questions:
    """The questions of a file: a dataset of `pic eval`, or records of `query` and perhaps `answers` over documents.

    Raises:
        InputError: names the file, the line and the key.
    """
    if name in datasets() or "query" not in (first := first_record(Path(name))).values or "documents" in first.values:
        if corpus.texts:
            raise InputError(f"{name}: names its own documents; omit the others")
        return draw(f"questions of {Path(name).name}", list(open_dataset(name, {}).cases()), limit)
    if not corpus.texts:
        raise InputError(f"{name}: names no documents; list them before --questions")
    cases = [_own_case(record, corpus) for record in read_records(Path(name))]
    return draw(f"questions of {Path(name).name}", cases, limit)


def _own_case(record: Record, corpus: Corpus) -> Case:
    answers = record.texts("answers") if record.values.get("answers") is not None else ()
    most = record.whole_number_or_none("max_new_tokens") or NEW_TOKENS
    return Case(str(record.number), corpus.documents_of(record), record.text("query"), answers, max_new_tokens=most)


def fitting(model: Model, questions: Questions, options: SpecOptions) -> tuple[Questions, int]:
    """The questions whose prompts fit the model, and how many do not."""
    skipped = set(group_cases(model, questions.cases(), options).skipped)
    kept = [
        (case, unit) for case, unit in zip(questions.listed, questions.units, strict=True) if case.id not in skipped
    ]  # fmt: skip
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(unit for _, unit in kept))}
    listed, units = tuple(case for case, _ in kept), tuple(numbers[unit] for _, unit in kept)
    return replace(questions, listed=listed, units=units), len(skipped)


def normalised_cross_entropy(model: Model, texts: Sequence[str], tokens: int = 512) -> float:
    """How surprising documents are to the model: the mean of -log p over about so many tokens, as a share of log V.

    1 is a model that knows nothing, as one with random weights.
    """
    import torch
    from torch.nn.functional import cross_entropy

    total, count = 0.0, 0
    for ids in (torch.tensor(model.encode(text)[:tokens]) for text in texts):
        if count >= tokens or len(ids) < 2:
            continue
        total += float(cross_entropy(model.next_logits(ids.tolist()[:-1]).cpu(), ids[1:], reduction="sum"))
        count += len(ids) - 1
    return total / count / math.log(model.config.vocab_size) if count else 1.0
