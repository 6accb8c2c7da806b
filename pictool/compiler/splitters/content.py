from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pictool.compiler.chunking import make_chunks
from pictool.compiler.splitters.base import Splitter
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_SENTENCE = re.compile(r".*?(?:[.!?。！？][\"'”’)\]]*\s+|\n+|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ContentSplitter(Splitter):
    """Boundaries that follow from the content around them: an edit changes the chunks around it, not all after it.

    A chunk ends after a sentence whose hash is small, as in content-defined chunking of files (LBFS, Muthitacharoen
    et al., SOSP 2001), once it has a quarter of `size`; at `size` it ends anyway. The pieces join to the text.

    Fields:
        size: tokens of a chunk at most; about half of it on average.
    """

    name: ClassVar[str] = "content"
    reference: ClassVar[str] = "LBFS (Muthitacharoen et al., SOSP 2001)"
    size: int = 512

    def pieces(self, model: Model, text: str) -> Iterable[str]:
        if self.size < 16:
            raise InputError(f"splitter {self.name}: size={self.size} must be 16 or more")
        for piece in self._cut(model, text):
            if len(model.encode(piece)) <= self.size:
                yield piece
            else:  # one sentence that is longer
                yield from (chunk.text for chunk in make_chunks(model, piece, "text", self.size))

    def _cut(self, model: Model, text: str) -> Iterator[str]:
        least, piece, length = self.size // 4, list[str](), 0
        for sentence in filter(None, _SENTENCE.findall(text)):
            tokens = len(model.encode(sentence))
            if piece and length + tokens > self.size:
                yield "".join(piece)
                piece, length = [], 0
            piece.append(sentence)
            length += tokens
            if length >= least and self._is_end(sentence, tokens):
                yield "".join(piece)
                piece, length = [], 0
        if piece:
            yield "".join(piece)

    def _is_end(self, sentence: str, tokens: int) -> bool:
        """Whether a sentence ends a chunk: once in a quarter of `size` tokens on average, whatever is around it."""
        return zlib.crc32(sentence.strip().encode(errors="surrogatepass")) < (1 << 32) * tokens / (self.size // 4)
