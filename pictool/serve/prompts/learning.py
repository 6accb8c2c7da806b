"""Parts of prompts that may come again: they are found by paragraphs, and compiled after an answer, within a budget.

A server computes the KV of what a prompt has anyway; but only at a prompt's beginning is that the KV of an object:
elsewhere it depends on what precedes it. So a part is compiled on its own, whatever prompts it was in.

A paragraph ends at an empty line. One that an earlier request of the tenant had is known; known ones that followed one
another there as they do here are one part. So documents that come in another order are parts of their own. What is
new between them is a part, too, without a short paragraph at either end, which may be a question. New parts are
compiled only while few of their objects wait for a first use, so that traffic in which nothing comes again
stores little.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby, islice
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
    from pictool.store.store import Store

MIN_LEARNED, MAX_LEARNED = 64, 4096  # tokens of a part, and of an object of it
_SHORT = 200  # characters of a paragraph that may be a question about the others
_UNUSED = 8  # this part of the budget may be of objects of texts that came once, none of which was used
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

    def find(self, tenant: str, texts: Iterable[str]) -> tuple[list[str], list[str]]:
        """The parts of a request's texts that an earlier one had, and those of new texts; then remember this one."""
        parts, new, met = list[str](), list[str](), dict[bytes, bytes]()
        for text in texts:
            spans = list(islice(paragraphs(text), self._remembered))
            hashes = [_hash(tenant, text[start:end]) for start, end in spans]
            for first, last in self._runs(hashes):
                parts.append(text[spans[first][0] : spans[last][1]])
            for is_known, group in groupby(zip(spans, hashes, strict=True), lambda pair: pair[1] in self._next):
                if not is_known and (inner := _without_ends([span for span, _ in group])):
                    new.append(text[inner[0][0] : inner[-1][1]])
            met.update(zip(hashes, [*hashes[1:], b""], strict=False))  # none of an empty text
        for own, following in met.items():
            self._next[own] = following
            self._next.move_to_end(own)
        while len(self._next) > self._remembered:
            self._next.popitem(last=False)
        return list(dict.fromkeys(parts)), list(dict.fromkeys(new))

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
    """What a server compiles of its requests: objects of `budget` bytes, of which those that were used least recently
    leave first. Of its methods, `find` may be called by several threads.

    Attributes:
        num_bytes: of objects that were made. num_failed: parts that could not be compiled, or not written.

    Args:
        index: of the store. Parts of which it knows most are not compiled.
        min_tokens: of a part, beside `MIN_LEARNED`. max_tokens: of an object.
    """

    def __init__(
        self, store: Store, budget: int, index: ContentIndex, min_tokens: int, max_tokens: int = MAX_LEARNED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._store, self._budget, self._index, self._clock = store, budget, index, clock
        self._min_tokens, self._max_tokens = max(MIN_LEARNED, min_tokens), min(MAX_LEARNED, max_tokens)
        self._repeats, self._finding, self._resumes = Repeats(), threading.Lock(), 0.0
        self.num_bytes, self.num_failed = 0, 0
        self._unused: dict[str, int] = {}  # bytes of objects of texts that came once
        self._keys = set[str]()

    def find(self, tenant: str, texts: Iterable[str]) -> dict[str, bool]:
        """The parts of a request's texts to compile, and whether each is new: none of the tenant's earlier requests had
        it. Not for an event loop: it reads the texts.
        """
        if not self._budget:
            return {}
        with self._finding:
            parts, new = self._repeats.find(tenant, texts)
        has_room = _UNUSED * sum([*self._unused.values()]) < self._budget
        found = dict.fromkeys(new, True) if has_room else {}
        return {} if self._clock() < self._resumes else found | dict.fromkeys(parts, False)

    def chunks(self, model: Model, policy: Policy, text: str) -> list[Chunk]:
        """What to compile of a part: nothing of a short one, nor what the store has or the budget does not hold.

        A piece of a long part is not computed after the one before it, which may be gone from the next prompt.
        """
        tokens = np.asarray(model.encode(text), dtype=np.int32)
        known = sum(len(match.tokens) for match in self._index.find(tokens, model.salt))
        if not policy.needs.objects or len(tokens) < self._min_tokens or 2 * known > len(tokens):
            return []
        chunks = make_chunks(model, text, "a part of a request", self._max_tokens)
        return [replace(chunk, before=()) for chunk in chunks if len(chunk) * model.token_bytes <= self._budget]

    def count(self, compiled: Compiled, is_new: bool) -> None:
        """An object was compiled, of a new part or of one that came again. Raises StoreError."""
        num_bytes = compiled.path.stat().st_size
        self.num_bytes += num_bytes
        self._keys.add(compiled.key)
        if is_new:
            self._unused[compiled.key] = num_bytes
        self._store.mark_learned(compiled.key, self._budget)

    def source_of(self, key: str, source: str = "recognised") -> str:
        """How an object was found that is used now: "moved" if it was compiled here, and recognised."""
        self._unused.pop(key, None)
        return "moved" if source == "recognised" and key in self._keys else source

    def fail(self, error: BaseException) -> None:
        """A part was not compiled: warn, and learn nothing for a while. Requests do not notice."""
        self.num_failed, self._resumes = self.num_failed + 1, self._clock() + PAUSE_S
        _log.warning("pic: a text that requests may repeat is not compiled: %s", error)


def _without_ends(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Paragraphs less the first and the last one, where they are short: a question, an instruction."""
    is_short = [end - start < _SHORT for start, end in (spans[0], spans[-1])]
    return spans[is_short[0] : len(spans) - is_short[1]]


def _hash(tenant: str, paragraph: str) -> bytes:
    named = tenant.encode() + b"\0" + paragraph.encode(errors="surrogatepass")
    return hashlib.blake2b(named, digest_size=16).digest()


def texts_of(prompt: ChatPrompt | RawPrompt) -> list[str]:
    """The texts that a request itself has, apart from objects and the template's."""
    if isinstance(prompt, RawPrompt):
        return ["".join(piece.text for piece in prompt.pieces if isinstance(piece, PlainText))]
    return ["".join(piece.text for piece in turn.pieces if isinstance(piece, PlainText)) for turn in prompt.turns]
