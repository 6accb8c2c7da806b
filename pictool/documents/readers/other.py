from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import Note, Section, UnreadableError, marked_sections
from pictool.documents.extraction import Extracting, extract, text_of
from pictool.documents.office import open_zip

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # compound files: Office before 2007, Outlook, Office with a password
_STREAMS = {
    "EncryptedPackage": "", "__properties_version1.0": "application/vnd.ms-outlook",
    "WordDocument": "application/msword", "PowerPoint Document": "application/vnd.ms-powerpoint",
    "Workbook": "application/vnd.ms-excel", "Book": "application/vnd.ms-excel",
}  # fmt: skip

_ZIPPED = (  # they name themselves in the first member, which is not compressed
    "application/epub+zip", "application/vnd.oasis.opendocument.text",
    "application/vnd.oasis.opendocument.spreadsheet",
)  # fmt: skip


class Other(Extracting):
    """What kreuzberg reads: OpenDocument, EPUB, RTF, Office before 2007 and Outlook's messages, by their headings."""

    name: ClassVar[str] = "other"
    order: ClassVar[int] = 1

    def recognises(self, data: bytes, suffix: str) -> bool:
        return _mime(data) is not None

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        if not (mime := _mime(data)):
            raise UnreadableError("is encrypted; save it without a password")
        if data.startswith(b"PK"):
            open_zip(data)
        result = extract(data, mime)
        yield from marked_sections(text_of(result))
        if result.images:
            yield Note(f"{len(result.images):,d} pictures not read")


def _mime(data: bytes) -> str | None:
    """The kind of a file for kreuzberg; empty if it is encrypted, None if it is of no such kind."""
    if data.startswith(_OLE):
        return next((mime for stream, mime in _STREAMS.items() if stream.encode("utf-16-le") in data), None)
    if data.startswith(b"PK"):
        return next((mime for mime in _ZIPPED if f"mimetype{mime}".encode() in data[:200]), None)
    return "application/rtf" if data.startswith(b"{\\rtf") else None
