"""Parts of prompts that come again: they are found by paragraphs, and compiled after an answer, within a budget.

A paragraph ends at an empty line. One that an earlier request of the tenant had is known; known ones that followed one
another there as they do here are one part. So documents that come in another order are parts of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable

from pictool.serve.work import Chat, Raw, Text

_PARAGRAPH = re.compile(r"\S.*?(?=\s*\n[ \t]*\n|\s*\Z)", re.DOTALL)
_REMEMBERED = 200_000  # paragraphs, of all tenants


class Repeats:
    """What requests have had, by tenant: the hash of each paragraph, and of the one that followed it last."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._next: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, tenant: str, texts: Iterable[str]) -> list[str]:
        """The parts of a request's texts that an earlier request had; then remember this one."""
        parts, met = list[str](), dict[bytes, bytes]()
        for text in texts:
            spans = [match.span() for match in _PARAGRAPH.finditer(text)]
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

    def _runs(self, hashes: list[bytes]) -> Iterable[tuple[int, int]]:
        """The first and last of known paragraphs that follow one another as before."""
        first = None
        for at, own in enumerate(hashes):
            if own not in self._next:
                first = None
                continue
            first = at if first is None else first
            following = hashes[at + 1] if at + 1 < len(hashes) else b""
            if following not in self._next or self._next[own] != following:
                yield first, at
                first = None


def _hash(tenant: str, paragraph: str) -> bytes:
    named = tenant.encode() + b"\0" + paragraph.encode(errors="surrogatepass")
    return hashlib.blake2b(named, digest_size=16).digest()


def texts_of(prompt: Chat | Raw) -> list[str]:
    """The texts that a request itself has, apart from objects and the template's."""
    if isinstance(prompt, Raw):
        return ["".join(piece.text for piece in prompt.pieces if isinstance(piece, Text))]
    return ["".join(piece.text for piece in turn.pieces if isinstance(piece, Text)) for turn in prompt.turns]
