"""Passages: what is retrieved and compiled, pieces of sections of at most so many tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pictool.compiler.chunking import MOST_BEFORE, cut_chunks, marker_note
from pictool.core import Chunk
from pictool.documents.base import Section
from pictool.documents.ranking import WordCounts, count_words
from pictool.documents.reading import Document
from pictool.escapes import encodable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pictool.runtime.model import Model

PASSAGE_TOKENS = 256
_SPAN = 4  # numbers of a passage in `Passages.spans`


@dataclass(frozen=True)
class Passage:
    """A piece of a document's text, and where it is. `before` are the last tokens of the document before it."""

    path: str
    place: str
    text: str
    tokens: tuple[int, ...]
    before: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def source(self) -> str:
        """As people write it: `report.pdf, p. 3`."""
        return f"{self.path}, {self.place}" if self.place else self.path

    def chunk(self, model: Model) -> Chunk:
        """The chunk of the passage for the model whose tokens it has."""
        if note := marker_note(model, self.text, self.source):
            model.on_note(note)
        return Chunk(self.text, self.tokens, encodable(self.source), before=self.before)


@dataclass(frozen=True, eq=False)
class Passages:
    """What a document was cut into, without its texts.

    Fields:
        document: without its sections.
        spans: of each passage its section, the characters there at which it starts and ends, and its tokens.
        words: of each passage, and of its place.
    """

    document: Document
    spans: NDArray[np.uint32]
    words: WordCounts

    def __len__(self) -> int:
        return len(self.spans)

    def of(self, document: Document, tokens: NDArray[np.uint32]) -> list[Passage]:
        """The passages, from the document with its sections, and the tokens of all.

        Raises:
            LookupError, ValueError: these are not theirs.
        """
        ends = self.spans[:, 3].cumsum().tolist()
        if len(tokens) != sum(ends[-1:]):
            raise ValueError(f"{len(tokens)} tokens")
        found = list[Passage]()
        for (at, start, end, size), last in zip(self.spans.tolist(), ends, strict=True):
            section, first = document.sections[at], last - size
            ids, before = tokens[first:last].tolist(), tokens[max(0, first - MOST_BEFORE) : first].tolist()
            text = _text_of(section)[start:end]
            found.append(Passage(str(document.path), section.place, text, tuple(ids), tuple(before)))
        return found

    def packed(self) -> bytes:
        """The bytes from which `unpacked` makes it again."""
        document, words = self.document, self.words
        head = json.dumps([document.reader, document.problem, document.notes, len(self), len(words.words)])
        arrays = words.words, words.texts, words.counts, self.spans, words.lengths
        return b"\n".join([head.encode(), b"".join(array.tobytes() for array in arrays)])


def unpacked(path: Path, name: str, data: bytes) -> Passages:
    """The passages of the document of this name. Raises ValueError, TypeError: the bytes are not those of `packed`."""
    import numpy as np

    head, _, rest = data.partition(b"\n")
    reader, problem, notes, size, entries = json.loads(head)
    numbers = np.frombuffer(rest, np.uint32)
    words, texts, counts, spans, lengths = np.split(numbers, np.cumsum([2 * entries, entries, entries, _SPAN * size]))
    if len(lengths) != size or not (texts < size).all():
        raise ValueError(f"{len(numbers)} numbers")
    document = Document(path, str(reader), problem=str(problem), notes=tuple(map(str, notes)), name=name)
    return Passages(document, spans.reshape(size, _SPAN), WordCounts(lengths, words.view(np.uint64), texts, counts))


def cut_document(
    model: Model, document: Document, passage_tokens: int = PASSAGE_TOKENS
) -> tuple[Passages, NDArray[np.uint32]]:
    """The passages of a document, in its order, and the tokens of all of them.

    A passage never joins two sections, so that it has one place.
    """
    import numpy as np

    spans, texts, tokens = list[tuple[int, int, int, int]](), list[str](), list[int]()
    for at, section in enumerate(document.sections):
        end = 0
        for chunk in cut_chunks(model, _text_of(section), str(document.path), passage_tokens):
            start, end = end, end + len(chunk.text)
            if chunk.text.strip():
                spans.append((at, start, end, len(chunk)))
                texts.append(f"{section.place}\n{chunk.text}")
                tokens += chunk.tokens
    numbers = np.array(spans, np.uint32).reshape(len(spans), _SPAN)
    return Passages(replace(document, sections=()), numbers, count_words(texts)), np.array(tokens, np.uint32)


def _text_of(section: Section) -> str:
    return section.text if section.text.endswith("\n") else section.text + "\n"
