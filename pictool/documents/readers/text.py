from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import Note, Reader, Section, UnreadableError
from pictool.documents.office import members
from pictool.documents.texts import decoded, line_sections

_KINDS = {
    b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture", b"GIF8": "a picture",
    b"PK\x03\x04": "an archive", b"\x1f\x8b": "an archive", b"7z\xbc\xaf": "an archive",
    b"\x28\xb5\x2f\xfd": "an archive", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a compound file of an unknown program",
    b"\x7fELF": "a program",
}  # fmt: skip


class TextReader(Reader):
    """Texts and source code in any encoding, in blocks of lines. It takes what no other reader does."""

    name: ClassVar[str] = "text"
    modules: ClassVar[tuple[str, ...]] = ("charset_normalizer",)
    order: ClassVar[int] = 9

    def recognises(self, data: bytes, suffix: str) -> bool:
        return True

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        if data.startswith(b"PK\x03\x04") and not members(data):
            raise UnreadableError("is a damaged archive")
        if kind := next((kind for magic, kind in _KINDS.items() if data.startswith(magic)), None):
            raise UnreadableError(f"is {kind}, which is not supported")
        yield from line_sections(decoded(data))
