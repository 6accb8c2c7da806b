"""Parts of prompts that come again: they are found by paragraphs, and compiled after an answer, within a budget.

A server computes the KV of what a prompt has anyway; but only at a prompt's beginning is that the KV of an object:
elsewhere it depends on what precedes it. So a part is compiled on its own, whatever prompts it was in.

A paragraph ends at an empty line. One that an earlier request of the tenant had is known; known ones that followed one
another there as they do here are one part. So documents that come in another order are parts of their own.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from pictool.compiler.chunking import make_chunks
from pictool.serve.work import ChatPrompt, PlainText, RawPrompt

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.core import Chunk
    from pictool.linker.policies.base import Policy
    from pictool.recognition.index import ContentIndex
    from pictool.runtime.model import Model

MIN_LEARNED, MAX_LEARNED = 64, 4096  # tokens of a part that requests repeat, and of an object of it
PAUSE_S = 60.0  # after an object could not be written, as on a full disk
_log = logging.getLogger("pictool.serve")
_EMPTY_LINE = re.compile(r"\n[ \t]*(?=\n)")
_REMEMBERED = 200_000  # paragraphs, of all tenants


def paragraphs(text: str) -> Iterator[tuple[int, int]]:
    """Where the paragraphs of a text begin and end, without the blanks around them. Takes time as the text is long."""
    start = 0
    for end in chain((line.start() for line in _EMPTY_LINE.finditer(text)), [len(text)]):
        part = text[start:end]
        if kept := part.strip():
            first = start + len(part) - len(part.lstrip())
            yield first, first + len(kept)
        start = end


class Repeats:
    """What requests have had, by tenant: the hash of each paragraph, and of the one that followed it last."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._next: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, tenant: str, texts: Iterable[str]) -> list[str]:
        """The parts of a request's texts that an earlier request had; then remember this one."""
        parts, met = list[str](), dict[bytes, bytes]()
        for text in texts:
            spans = list(islice(paragraphs(text), self._remembered))
            hashes = [_hash(tenant, text[start:end]) for start, end in spans]
            for first, last in self._runs(hashes):
                parts.append(text[spans[first][0] : spans[last][1]])
            met.update(zip(hashes, [*hashes[1:], b""], strict=False))  # none of an empty text
        for own, following in met.items():
            self._next[own] = following
            self._next.move_to_end(own)
        while len(self._next) > self._remembered:
            self._next.popitem(last=False)
        return list(dict.fromkeys(parts))

    def _runs(self, hashes: list[bytes]) -> list[list[int]]:
        """The first and last of known paragraphs that follow one another as before."""
        runs: list[list[int]] = []
        for at, own in enumerate(hashes):
            if own not in self._next:
                continue
            if runs and runs[-1][1] == at - 1 and self._next[hashes[at - 1]] == own:
                runs[-1][1] = at
            else:
                runs.append([at, at])
        return runs


class Learner:
    """What a server compiles of its requests, until objects of `budget` bytes were made. Of its methods, `find` may be
    called by several threads.

    Attributes:
        num_bytes: of objects that were made. num_failed: parts that could not be compiled, or not written.

    Args:
        index: of the store. Parts of which it knows most are not compiled.
        min_tokens: of a part, beside `MIN_LEARNED`. max_tokens: of an object.
    """

    def __init__(
        self, budget: int, index: ContentIndex, min_tokens: int, max_tokens: int = MAX_LEARNED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._budget, self._index, self._clock = budget, index, clock
        self._min_tokens, self._max_tokens = max(MIN_LEARNED, min_tokens), min(MAX_LEARNED, max_tokens)
        self._repeats, self._finding, self._resumes = Repeats(), threading.Lock(), 0.0
        self.num_bytes, self.num_failed, self._keys = 0, 0, set[str]()

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self.num_bytes >= self._budget

    def find(self, tenant: str, texts: Iterable[str]) -> list[str]:
        """The parts of a request's texts to compile: those that an earlier request of the tenant had. Not for an event
        loop: it reads the texts.
        """
        if not self._budget:
            return []
        with self._finding:
            parts = self._repeats.find(tenant, texts)
        return [] if self.is_over or self._clock() < self._resumes else parts

    def chunks(self, model: Model, policy: Policy, parts: Iterable[str]) -> Iterator[Chunk]:
        """What to compile of these parts, while the budget lasts: not short ones, nor what the store has."""
        for text in parts if policy.needs.objects else ():
            tokens = np.asarray(model.encode(text), dtype=np.int32)
            known = sum(len(match.tokens) for match in self._index.find(tokens, policy.needs.sinks, model.salt))
            if len(tokens) < self._min_tokens or 2 * known > len(tokens):
                continue
            for chunk in make_chunks(model, text, "a repeated part", self._max_tokens):
                if self.is_over:
                    return
                yield chunk

    def count(self, compiled: Compiled) -> None:
        """An object was compiled."""
        self.num_bytes += compiled.path.stat().st_size if compiled.is_new else 0
        self._keys.add(compiled.key)

    def source_of(self, key: str, source: str = "recognised") -> str:
        """How an object was found: "moved" if it was compiled here, and recognised."""
        return "moved" if source == "recognised" and key in self._keys else source

    def fail(self, error: BaseException) -> None:
        """A part was not compiled: warn, and learn nothing for a while. Requests do not notice."""
        self.num_failed, self._resumes = self.num_failed + 1, self._clock() + PAUSE_S
        _log.warning("pic: a text that requests repeat is not compiled: %s", error)


def _hash(tenant: str, paragraph: str) -> bytes:
    named = tenant.encode() + b"\0" + paragraph.encode(errors="surrogatepass")
    return hashlib.blake2b(named, digest_size=16).digest()


def texts_of(prompt: ChatPrompt | RawPrompt) -> list[str]:
    """The texts that a request itself has, apart from objects and the template's."""
    if isinstance(prompt, RawPrompt):
        return ["".join(piece.text for piece in prompt.pieces if isinstance(piece, PlainText))]
    return ["".join(piece.text for piece in turn.pieces if isinstance(piece, PlainText)) for turn in prompt.turns]
