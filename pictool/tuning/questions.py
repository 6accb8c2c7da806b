"""The questions on which policies are measured: the user's, the model's own, or documents that are to be continued."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.compiler.chunking import make_chunks, read_text
from pictool.core import Sampling
from pictool.documents.ranking import TextIndex
from pictool.engines.answer_file import model_identity
from pictool.errors import InputError
from pictool.eval.cases import SpecOptions, group_cases
from pictool.eval.datasets import datasets, open_dataset
from pictool.eval.datasets.base import Case, Dataset
from pictool.eval.datasets.records import Record, first_record, read_records
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.reading import parse_json, read_file
from pictool.store.directory import make_within
from pictool.store.store import Store, atomic_write

if TYPE_CHECKING:
    from pictool.runtime.model import Model

DOCUMENTS = 8  # of a prompt, at most
MAX_WRITTEN = 256  # questions that the model writes, each an answer of its own
NEW_TOKENS = 16  # of an answer, where nobody says how long answers are
_PASSAGE_WORDS, _CUE_WORDS, _CONTINUED_WORDS = 60, 12, 6
_ROOM = 192  # tokens that a prompt of documents leaves for its question, its template and the answer
_ASK = (
    "Write one short question that the following passage answers. Write the question only, in the language of the "
    "passage.\n\n{passage}"
)
_WRITING = Sampling(temperature=0.8, top_p=0.95, stop=("\n",))
_MAX_BYTES = 64 << 20


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
                "files", f"names {name}, which is not among the documents; name it before --questions"
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
            raise InputError(f"{name}: names its own documents; leave the others out")
        return draw(f"questions of {Path(name).name}", list(open_dataset(name, {}).cases()), limit)
    if not corpus.texts:
        raise InputError(f"{name}: names no documents; name them before --questions")
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


def continued(model: Model, texts: Sequence[str], documents: int, limit: int) -> Questions:
    """Passages of documents, which the model continues with the document before it.

    A prompt is some of the documents in a random order, and some words of one of them; the answer is the next words.

    Raises:
        InputError: documents of too few words.
    """
    rng, cases = random.Random("tune continue 0"), list[Case]()
    sizes = [len(model.encode(text + model.separator)) for text in texts]
    long = [i for i, text in enumerate(texts) if len(text.split()) > _CUE_WORDS + _CONTINUED_WORDS]
    if not long:
        raise InputError(f"no document has more than {_CUE_WORDS + _CONTINUED_WORDS} words; give --questions")
    for number in range(limit):
        target = rng.choice(long)
        words = list(re.finditer(r"\S+", texts[target]))
        start = rng.randrange(len(words) - _CUE_WORDS - _CONTINUED_WORDS + 1)
        cut, end = start + _CUE_WORDS, start + _CUE_WORDS + _CONTINUED_WORDS
        cue = texts[target][words[start].start() : words[cut - 1].end()]
        gold = texts[target][words[cut].start() : words[end - 1].end()]
        chosen = _prompt_of(rng, target, sizes, documents, model.max_positions)
        cases.append(Case(
            str(number), tuple(texts[i] for i in chosen), cue, (gold,), query_template="{query}",
            max_new_tokens=NEW_TOKENS,
        ))  # fmt: skip
    return Questions("continuations of passages", tuple(cases), tuple(range(len(cases))))


def written(
    model: Model, store: Store, texts: Sequence[str], documents: int, limit: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Questions:  # fmt: skip
    """Questions that the model writes about passages of the documents. They are kept in the store.

    Raises:
        InputError: it writes none.
    """
    count = min(limit, MAX_WRITTEN)
    path = _written_path(model, store, texts, documents, count, 0)
    if path.exists():
        cases = [Case(**_tuples(values)) for values in parse_json(read_file(path, _MAX_BYTES))]
    else:
        cases = list(_write(model, store, texts, documents, count, on_progress))
        make_within(store.root, "eval", "questions")
        with atomic_write(path, store.root / "tmp") as file:
            file.write(json.dumps([asdict(case) for case in cases]).encode())
    if not cases:
        raise InputError(f"{model.name}: writes no questions about these documents; give --questions")
    return Questions("questions that the model wrote", tuple(cases), tuple(range(len(cases))))


def _write(
    model: Model, store: Store, texts: Sequence[str], documents: int, count: int,
    on_progress: Callable[[int, int], None],
) -> Iterator[Case]:  # fmt: skip
    from pictool.engines import engine_of

    rng, seen = random.Random("tune write 0"), set[str]()
    sizes = [len(model.encode(text + model.separator)) for text in texts]
    engine, full = engine_of(model)(model, store), make_policy(BASELINE)
    for number in range(count):
        on_progress(number, count)
        target = rng.randrange(len(texts))
        ask = _ASK.format(passage=_passage(rng, texts[target]))
        spec = Spec(ask, policy=full, max_new_tokens=48, sampling=replace(_WRITING, seed=number))
        question = engine.answer(spec).text
        chosen = _prompt_of(rng, target, sizes, documents, model.max_positions)
        if len(question.split()) > 2 and question not in seen:
            seen.add(question)
            picked = tuple(texts[i] for i in chosen)
            yield Case(str(number), picked, question, (), max_new_tokens=NEW_TOKENS)
    on_progress(count, count)


def _passage(rng: random.Random, text: str) -> str:
    """Some words of a text, as they are there."""
    words = list(re.finditer(r"\S+", text))
    start = rng.randrange(max(1, len(words) - _PASSAGE_WORDS + 1))
    return text[words[start].start() : words[min(start + _PASSAGE_WORDS, len(words)) - 1].end()]


def _prompt_of(rng: random.Random, target: int, sizes: Sequence[int], documents: int, positions: int) -> list[int]:
    """The document that is asked about and others for which there is room, in a random order."""
    room = positions - _ROOM - sizes[target]
    chosen = [target]
    others = [i for i in range(len(sizes)) if i != target]
    for other in islice(rng.sample(others, len(others)), documents - 1):
        if sizes[other] <= room:
            chosen.append(other)
            room -= sizes[other]
    rng.shuffle(chosen)
    return chosen


def _written_path(model: Model, store: Store, texts: Sequence[str], *settings: object) -> Path:
    made_of = json.dumps([model_identity(model), _ASK, asdict(_WRITING), list(texts), *settings])
    return store.root / "eval" / "questions" / f"{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.json"


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


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
