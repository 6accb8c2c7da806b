"""Passages: what is retrieved and compiled, pieces of sections of at most so many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunk, make_chunks
from pictool.core import Chunk
from pictool.documents.reading import Document

if TYPE_CHECKING:
    from pictool.runtime.model import Model

PASSAGE_TOKENS = 256


@dataclass(frozen=True)
class Passage:
    """A piece of a document's text, and where it is."""

    path: str
    place: str
    text: str
    num_tokens: int

    @property
    def source(self) -> str:
        """As people write it: `report.pdf, p. 3`."""
        return f"{self.path}, {self.place}" if self.place else self.path

    def chunk(self, model: Model) -> Chunk:
        return make_chunk(model, self.text, self.source)


def passages_of(model: Model, document: Document, passage_tokens: int = PASSAGE_TOKENS) -> Iterator[Passage]:
    """The passages of a document, in its order. A passage never joins two sections, so that it has one place."""
    for section in document.sections:
        text = section.text if section.text.endswith("\n") else section.text + "\n"
        for chunk in make_chunks(model, text, str(document.path), passage_tokens):
            if chunk.text.strip():
                yield Passage(str(document.path), section.place, chunk.text, len(chunk))
