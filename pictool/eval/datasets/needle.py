"""A needle in a haystack: one sentence hidden in any text, at a grid of depths and lengths."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from pictool.compiler.chunking import read_text
from pictool.errors import InputError
from pictool.eval.datasets.base import Case, Dataset

_WORD = re.compile(r"\S+\s*")
_SENTENCE_END = re.compile(r"(?:[.!?。！？][\"'”’)\]]*\s+|\n\s*\n\s*)$")  # of a word and the white space after it
_LONGEST_SENTENCE = 100  # words


@dataclass(frozen=True)
class Needle(Dataset):
    """Needle in a haystack (Kamradt 2023), with the needle, question and metric of RULER's single needle.

    Lengths are in words (runs without white space), the needle's included and exact, so that a case is the same for
    every model; a token is about three quarters of an English word. The haystack is cut into chunks of `chunk_words`
    words first, and then the needle is put into one of them: no chunk border cuts it, its chunk is longer by it, and
    all other chunks are the same at every depth. `kind` is the depth.
    """

    name: ClassVar[str] = "needle"
    reference: ClassVar[str] = "github.com/gkamradt/LLMTest_NeedleInAHaystack; RULER, arXiv:2404.06654"
    files: tuple[str, ...]  # paths or patterns (`**` for folders in folders); joined, and repeated if too short
    needle: str = "One of the special magic numbers for harbour is: 7391482."
    question: str = "What is the special magic number for harbour mentioned in the provided text?"
    answer: str = "7391482"
    lengths: tuple[int, ...] = (1000, 2000, 4000)  # words
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)  # percent of the haystack before the needle
    chunk_words: int = 200

    def __post_init__(self) -> None:
        for field in ("files", "lengths", "depths"):
            _require_distinct(field, getattr(self, field))
        for field in ("needle", "question", "answer"):
            if not getattr(self, field).strip():
                raise InputError(f"needle: {field}= is blank")
        shortest = len(_words(self.needle)) + 1
        for length in self.lengths:
            if length < shortest:
                raise InputError(
                    f"needle: lengths={length} must be {shortest} words or more: the needle and one of hay"
                )
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise InputError(f"needle: depths={depth:g} must be from 0 to 100 percent")
        if self.chunk_words < 1:
            raise InputError(f"needle: chunk_words={self.chunk_words} must be 1 or more")

    def cases(self) -> Iterator[Case]:
        words = self._haystack()
        for length in self.lengths:
            hay = list(islice(cycle(words), length - len(_words(self.needle))))
            for depth in self.depths:
                yield Case(
                    id=f"length={length},depth={depth}",
                    documents=self._documents(hay, depth),
                    query=self.question,
                    answers=(self.answer,),
                    kind=f"depth {depth:g}%",
                    metric="contains",
                    is_one_text=True,
                )

    def _haystack(self) -> list[str]:
        """The words of all files, each with the white space after it; a blank line between files."""
        return _words("".join(read_text(path).strip() + "\n\n" for path in _paths(self.files)))

    def _documents(self, hay: Sequence[str], depth: float) -> tuple[str, ...]:
        size = self.chunk_words
        place = _place(hay, depth)
        chunks = ["".join(hay[start : start + size]) for start in range(0, len(hay), size)]
        chosen = min(place // size, len(chunks) - 1)
        before, after = "".join(hay[chosen * size : place]), "".join(hay[place : (chosen + 1) * size])
        chunks[chosen] = f"{before}{self.needle.strip()} {after}"
        return tuple(chunks)


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _place(hay: Sequence[str], depth: float) -> int:
    """How many words come before the needle: up to the last end of a sentence at or before the depth.

    Depth 100 is the very end. Where no sentence has ended for a hundred words (a list), any two words are cut apart.
    """
    place = int(len(hay) * depth / 100)
    if place == len(hay):
        return place
    for border in range(place, max(-1, place - _LONGEST_SENTENCE), -1):
        if border == 0 or _SENTENCE_END.search(hay[border - 1]):
            return border
    return place


def _paths(patterns: Sequence[str]) -> list[Path]:
    """The files that the patterns name, in order, each once; those of one pattern by name."""
    names: dict[str, None] = {}
    for pattern in patterns:
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (absolute patterns)
        if not paths:
            raise InputError(f"{pattern}: no such file")
        names |= dict.fromkeys(paths)
    return [Path(name) for name in names]


def _require_distinct(field: str, values: Sequence[Any]) -> None:
    if not values:
        raise InputError(f"needle: {field}= must name at least one")
    for i, value in enumerate(values):
        if value in values[:i]:
            raise InputError(f"needle: {field}={value} is named twice")
