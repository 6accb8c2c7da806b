from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pictool.documents.base import MAX_PAGES, Reader, Section, UnreadableError, unhyphenated

if TYPE_CHECKING:
    from pypdf import PdfReader


class Pdf(Reader):
    """PDF, a section for each page. What is encrypted for reading, or has pictures of pages only, is named as such."""

    name: ClassVar[str] = "PDF"
    modules: ClassVar[tuple[str, ...]] = ("pypdf",)

    def recognises(self, data: bytes, suffix: str) -> bool:
        return b"%PDF-" in data[:1024]

    def sections(self, data: bytes) -> Iterator[Section]:
        from pypdf import PdfReader

        pages = _open(PdfReader(io.BytesIO(data)))
        has_text = False
        for number, page in enumerate(pages.pages, 1):
            text = unhyphenated(page.extract_text())
            has_text = has_text or bool(text.strip())
            yield Section(text, f"p. {number}")
        if not has_text:
            raise UnreadableError("is scanned: its pages are images; run OCR first (ocrmypdf)")


def _open(pages: PdfReader) -> PdfReader:
    """The same, decrypted if that needs no password."""
    from pypdf import PasswordType
    from pypdf.errors import DependencyError

    if pages.is_encrypted:
        try:
            is_open = pages.decrypt("") is not PasswordType.NOT_DECRYPTED
        except DependencyError as error:
            raise UnreadableError(
                "is encrypted with AES; install cryptography, or save it without a password"
            ) from error
        if not is_open:
            raise UnreadableError("is encrypted; save it without a password (qpdf --decrypt)")
    if len(pages.pages) > MAX_PAGES:
        raise UnreadableError(f"has more than {MAX_PAGES:,d} pages; split it")
    return pages
