from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pictool.compiler.splitters.base import Splitter, not_installed
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class LlamaIndex(Splitter):
    """The pieces of LlamaIndex's `SentenceSplitter`, by that very class, with the model's tokens as its tokenizer's.

    Fields:
        size, overlap: tokens of a piece at most, and those that two may have in common; LlamaIndex's defaults.
    """

    name: ClassVar[str] = "llama-index"
    reference: ClassVar[str] = "llama_index.core.node_parser.SentenceSplitter"
    size: int = 1024
    overlap: int = 200

    def pieces(self, model: Model, text: str) -> Iterable[str]:
        try:
            from llama_index.core.node_parser import SentenceSplitter
        except ImportError as error:
            raise not_installed("llama-index-core") from error
        try:
            splitter = SentenceSplitter(
                chunk_size=self.size, chunk_overlap=self.overlap, tokenizer=lambda part: list(model.encode(part))
            )
        except ValueError as error:
            raise InputError(f"splitter {self.name}: {error}") from error
        pieces: list[str] = splitter.split_text(text)
        return pieces
