from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pictool.compiler.splitters.base import Splitter, not_installed
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class LangChain(Splitter):
    """The pieces of LangChain's `RecursiveCharacterTextSplitter`, by that very class.

    Fields:
        size, overlap: characters of a piece at most, and those that two may have in common; LangChain's defaults.
    """

    name: ClassVar[str] = "langchain"
    reference: ClassVar[str] = "langchain_text_splitters.RecursiveCharacterTextSplitter"
    size: int = 4000
    overlap: int = 200

    def pieces(self, model: Model, text: str) -> Iterable[str]:
        try:
            from langchain_text_splitters import RecursiveCharacterTextSplitter
        except ImportError as error:
            raise not_installed("langchain-text-splitters") from error
        try:
            splitter = RecursiveCharacterTextSplitter(chunk_size=self.size, chunk_overlap=self.overlap)
        except ValueError as error:
            raise InputError(f"splitter {self.name}: {error}") from error
        return splitter.split_text(text)
