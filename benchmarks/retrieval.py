"""How well `pic ask` finds passages of real files: 100 questions on the documentation of Debian packages, by BM25.

    OMP_NUM_THREADS=1 python -m benchmarks.retrieval --model smollm2 --out benchmarks/results/retrieval.json

A line of `retrieval_questions.jsonl` has a question, and a text that the passages that answer it have. Packages are
fetched with `apt-get download`, in the versions of the system's release, and not installed; a question whose package or
text is gone is left out. Every second question is for choosing among variants, the others for reporting.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.output import write_results
from pictool.documents import ranking
from pictool.documents.finding import find_files
from pictool.documents.passages import Passage, cut_document
from pictool.documents.reading import Document, FileReader
from pictool.runtime.model import Model, load_model

QUESTIONS = Path(__file__).with_name("retrieval_questions.jsonl")
_MOST_CHARACTERS = 40_000  # of a file
_LEFT_OUT = re.compile(r"(.*/)?((changelog|copyright|changes\.|buildinfo)[^/]*|relnotes/.*)", re.IGNORECASE)
_KINDS = ("", ".txt", ".md", ".rst", ".debian")
_FOUND = 8  # passages that `pic ask` links
Split = Callable[[str], list[str]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Question:
    package: str
    file: str
    question: str
    passage: str


@dataclass(frozen=True)
class Variant:
    """What is chosen; the defaults are those of 0.3.

    `title`: what is ranked with a passage's text. `left_out`: words of questions.
    """

    tokens: int = 256
    words: str = "words"
    title: str = "source"
    left_out: str = "none"
    method: str = "lucene"
    k1: float = 1.5
    b: float = 0.75


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def names(text: str) -> list[str]:
    """Words, and the parts of names: `png_set_gamma` is also `png`, `set`, `gamma`, `readHeader` `read`, `header`."""
    found = list[str]()
    for name in re.findall(r"\w+", text):
        parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[A-Z]", name)
        found += [part.lower() for part in parts] + [name.lower()] * (len(parts) > 1)
    return found


def joined(text: str) -> list[str]:
    """These, and names with hyphens, points or slashes as a whole."""
    return names(text) + [name.lower() for name in re.findall(r"\w+(?:[-.:/+]\w+)+", text)]


def singular(split: Split) -> Split:
    """Without the endings of plurals (Harman's S-stemmer)."""

    def stem(word: str) -> str:
        if word.endswith("ies") and not word.endswith(("eies", "aies")):
            return word[:-3] + "y"
        return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("us", "ss")) else word

    return lambda text: [stem(word) for word in split(text)]


SPLITS: dict[str, Split] = {"words": words, "names": names, "joined": joined}
SPLITS |= {f"{name}, singular": singular(split) for name, split in list(SPLITS.items())}
LEFT_OUT = {"none": frozenset[str](), "question words": ranking.OF_QUESTIONS}
TITLES = ("none", "source", "twice")
METHODS = ("lucene", "robertson", "bm25+", "bm25l")
ALTERNATIVES: dict[str, Sequence[Any]] = {
    "tokens": (128, 256, 512), "words": tuple(SPLITS), "title": TITLES, "left_out": tuple(LEFT_OUT), "method": METHODS,
    "k1": (0.4, 0.6, 0.9, 1.2, 1.5, 2.0), "b": (0.0, 0.25, 0.5, 0.75, 0.9),
}  # fmt: skip


def fetch(packages: Sequence[str], folder: Path) -> dict[str, str]:
    """Put the texts of packages into a folder; their versions. If one is gone, apt-get is asked for each alone."""
    with tempfile.TemporaryDirectory() as inside:
        command = ["apt-get", "download", "-qq"]
        if subprocess.run([*command, *packages], cwd=inside, check=False, stderr=subprocess.DEVNULL).returncode:
            for package in packages:
                subprocess.run([*command, package], cwd=inside, check=False, stderr=subprocess.DEVNULL)
        for deb in sorted(Path(inside).glob("*.deb")):
            unpack(deb, folder)
        return dict(deb.name.split("_")[:2] for deb in sorted(Path(inside).glob("*.deb")))


def unpack(deb: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as inside:
        subprocess.run(["dpkg-deb", "-x", str(deb), inside], check=True)
        docs = Path(inside, "usr/share/doc")
        for path in sorted(docs.rglob("*")):
            name = path.relative_to(docs).with_name(path.name.removesuffix(".gz"))
            is_text = name.suffix.lower() in _KINDS and not _LEFT_OUT.fullmatch(str(name))
            if is_text and path.is_file() and not path.is_symlink():
                data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(data.decode(errors="ignore")[:_MOST_CHARACTERS])


def cut(name: str, folder: Path, size: int) -> list[Passage]:
    """The passages of a folder, as `pic ask` cuts them, named by their paths in it."""
    model = load_model(name)
    with FileReader() as reader:
        documents = map(reader.read, find_files([folder]))
        found = [passage for document in documents for passage in passages_of(model, document, size)]
    return [replace(one, path=str(Path(one.path).relative_to(folder))) for one in found]


def passages_of(model: Model, document: Document, size: int) -> list[Passage]:
    passages, tokens = cut_document(model, document, size)
    return passages.of(document, tokens)


def answers(question: Question, passages: Sequence[Passage], texts: Sequence[str]) -> set[int]:
    """The passages with the question's text, in whichever file it is; if it was cut apart, with a half of it."""
    found, middle = {at for at, text in enumerate(texts) if question.passage in text}, len(question.passage) // 2
    halves = question.passage[:middle], question.passage[middle:]
    return found or {
        at for at, text in enumerate(texts)
        if passages[at].path == question.file and any(half in text for half in halves)
    }  # fmt: skip


class Corpus:
    """Passages of one size, and how often they have the words of the questions."""

    def __init__(self, passages: Sequence[Passage], questions: Sequence[Question]) -> None:
        texts = [" ".join(one.text.split()) for one in passages]
        found = [(question, answers(question, passages, texts)) for question in questions]
        self.passages, self.right = passages, dict(found)
        self._counts: dict[tuple[str, str], tuple[dict[str, int], Floats, Floats]] = {}

    def counts(self, split: str, title: str) -> tuple[dict[str, int], Floats, Floats]:
        """The row of each word of a question, its counts [words, passages], and the lengths of the passages."""
        if (split, title) not in self._counts:
            known = sorted({word for question in self.right for word in SPLITS[split](question.question)})
            rows = {word: row for row, word in enumerate(known)}
            counts, lengths = np.zeros((len(rows), len(self.passages))), np.zeros(len(self.passages))
            for at, passage in enumerate(self.passages):
                above = {"none": "", "source": passage.source, "twice": f"{passage.source}\n{passage.source}"}[title]
                found = SPLITS[split](f"{above}\n{passage.text}")
                lengths[at] = len(found)
                for word, number in Counter(found).items():
                    if word in rows:
                        counts[rows[word], at] = number
            self._counts[split, title] = rows, counts, lengths
        return self._counts[split, title]

    def ranks(self, variant: Variant, questions: Sequence[Question]) -> list[int]:
        """The rank, from 1 on, of the best passage that answers each question."""
        rows, counts, lengths = self.counts(variant.words, variant.title)
        weights = bm25(counts, lengths, variant)

        def scores(question: str) -> Floats:
            words = SPLITS[variant.words](question)
            kept = [word for word in words if word not in LEFT_OUT[variant.left_out]] or words
            result: Floats = weights[[rows[word] for word in kept]].sum(0)
            return result

        return list(self._ranks(scores, questions))

    def names(self, question: Question) -> bool:
        """Whether a question has a rare name: a word that at most 5 passages have, of which one answers."""
        rows, counts, _ = self.counts("joined", "source")
        of = [counts[rows[word]] for word in joined(question.question)]
        return any((row > 0).sum() <= 5 and any(row[at] for at in self.right[question]) for row in of)

    def ranks_of_pictool(self, questions: Sequence[Question]) -> list[int]:
        """The same as `pic ask` ranks."""
        index = ranking.TextIndex([f"{one.source}\n{one.text}" for one in self.passages])

        def scores(question: str) -> Floats:
            by_passage = dict(index.scored(question))
            return np.array([by_passage[at] for at in range(len(self.passages))])

        return list(self._ranks(scores, questions))

    def _ranks(self, scores: Callable[[str], Floats], questions: Sequence[Question]) -> Iterator[int]:
        for question in questions:
            order = np.argsort(-scores(question.question), kind="stable").tolist()
            yield 1 + next(rank for rank, at in enumerate(order) if at in self.right[question])


def bm25(counts: Floats, lengths: Floats, variant: Variant) -> Floats:
    """The weight of each word in each passage, by the formulas of bm25s."""
    k1, with_word, number = variant.k1, (counts > 0).sum(1)[:, None], len(lengths)
    by_length = 1 - variant.b + variant.b * lengths / lengths.mean()
    saturated = counts / (counts + k1 * by_length)
    raised = counts / by_length + 0.5
    rarity, gain = {
        "lucene": (1 + (number - with_word + 0.5) / (with_word + 0.5), saturated),
        "robertson": (np.maximum((number - with_word + 0.5) / (with_word + 0.5), 1), saturated),
        "bm25+": ((number + 1) / np.maximum(with_word, 1), ((k1 + 1) * saturated + 1) * (counts > 0)),
        "bm25l": ((number + 1) / (with_word + 0.5), (k1 + 1) * raised / (k1 + raised) * (counts > 0)),
    }[variant.method]
    weights: Floats = np.log(rarity) * gain
    return weights


def figures(found: Sequence[int], tokens: int) -> dict[str, float]:
    """`recall_in_2048`: with as many passages as have 2,048 tokens, 8 of 256."""
    return {
        "recall_3": fmean(rank <= 3 for rank in found), f"recall_{_FOUND}": fmean(rank <= _FOUND for rank in found),
        "recall_in_2048": fmean(rank <= _FOUND * 256 // tokens for rank in found), "mean_rank": fmean(found),
        "mean_reciprocal_rank": round(fmean(1 / rank for rank in found), 4), "worst": max(found),
    }  # fmt: skip


def choose(corpus: Corpus, questions: Sequence[Question], named: Sequence[Question]) -> Variant:
    """The best variant of one size, by one change after the other until none is better.

    First by how many of all questions with a rare name (`named`, of both halves) have their passage among the first 3,
    which must not fail; then by the recalls and the mean reciprocal rank over `questions`.
    """

    def quality(variant: Variant) -> tuple[float, float]:
        of = figures(corpus.ranks(variant, questions), variant.tokens)
        of_named = figures(corpus.ranks(variant, named), variant.tokens)
        return of_named["recall_3"], of["recall_3"] + of["recall_8"] + of["mean_reciprocal_rank"]

    best, found = Variant(), (0.0, 0.0)
    while True:
        changes = [(name, value) for name, values in ALTERNATIVES.items() if name != "tokens" for value in values]
        quality_of = {each: quality(each) for each in (replace(best, **{name: value}) for name, value in changes)}
        first = max(quality_of, key=quality_of.__getitem__)
        if quality_of[first] <= found:
            return best
        best, found = first, quality_of[first]
        print(found, best, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose tokens are counted")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    questions = [Question(**json.loads(line)) for line in lines]
    sizes = ALTERNATIVES["tokens"]
    with tempfile.TemporaryDirectory() as inside, ProcessPoolExecutor(len(sizes)) as pool:
        versions = fetch(sorted({question.package for question in questions}), Path(inside))
        found = pool.map(partial(cut, options.model, Path(inside)), sizes)
        corpora = {size: Corpus(passages, questions) for size, passages in zip(sizes, found, strict=True)}
    questions = [question for question in questions if all(corpus.right[question] for corpus in corpora.values())]
    groups = {"chosen_on": questions[::2], "reported": questions[1::2]}
    groups["with_rare_name"] = [each for each in questions if corpora[256].names(each)]

    def of_groups(ranks: Callable[[Sequence[Question]], list[int]], tokens: int) -> dict[str, Any]:
        return {name: figures(ranks(group), tokens) for name, group in groups.items()}

    def of(variant: Variant) -> dict[str, Any]:
        return asdict(variant) | of_groups(lambda group: corpora[variant.tokens].ranks(variant, group), variant.tokens)

    def changed(start: Variant) -> dict[str, Any]:
        return {
            name: [of(replace(start, **{name: value})) for value in values] for name, values in ALTERNATIVES.items()
        }

    best = choose(corpora[256], groups["chosen_on"], groups["with_rare_name"])
    write_results(options.out, {
        "questions": {"all": len(questions), "left_out": len(lines) - len(questions)}
        | {name: len(group) for name, group in groups.items()},
        "versions": versions, "passages": {size: len(corpus.passages) for size, corpus in corpora.items()},
        "as_0.3": of(Variant()), "best": of(best),
        "now": {size: of_groups(corpus.ranks_of_pictool, size) for size, corpus in corpora.items()},
        "changed_from_0.3": changed(Variant()), "changed_from_best": changed(best),
    })  # fmt: skip


if __name__ == "__main__":
    main()
