from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import ClassVar
from zipfile import is_zipfile

from pictool.documents.archives import is_old_office, is_outlook
from pictool.documents.base import Reader, Section, UnreadableError
from pictool.documents.texts import decoded, line_sections

_ZIP = b"PK\x03\x04"
_KINDS = {
    b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture", b"GIF8": "a picture",
    _ZIP: "an archive", b"\x1f\x8b": "an archive", b"7z\xbc\xaf": "an archive",
    b"\x28\xb5\x2f\xfd": "an archive",
    b"\x7fELF": "a program",
}  # fmt: skip


class TextReader(Reader):
    """Texts and source code in any encoding, in blocks of lines. It takes what no other reader does."""

    name: ClassVar[str] = "text"
    modules: ClassVar[tuple[str, ...]] = ("charset_normalizer",)
    order: ClassVar[int] = 9

    def recognises(self, data: bytes, suffix: str) -> bool:
        return True

    def sections(self, data: bytes) -> Iterator[Section]:
        if is_outlook(data):
            raise UnreadableError("is an Outlook message; save it as .eml")
        if is_old_office(data):
            raise UnreadableError("is an Office file from before 2007, or encrypted; save it as docx, pptx or xlsx")
        if data.startswith(_ZIP) and not is_zipfile(BytesIO(data)):
            raise UnreadableError("is a damaged archive")
        if kind := next((kind for magic, kind in _KINDS.items() if data.startswith(magic)), None):
            raise UnreadableError(f"is {kind}, whose text cannot be read here")
        yield from line_sections(decoded(data))
