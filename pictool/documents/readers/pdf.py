from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.documents.base import MAX_PAGES, Note, Reader, Section, UnreadableError, unhyphenated

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

_FIELD, _LEFT_OUT = "/Widget", ("/Link", "/Popup", "/Widget")


class Pdf(Reader):
    """PDF, a section for each page, with filled fields of forms and comments. Pages without a text are named."""

    name: ClassVar[str] = "PDF"
    modules: ClassVar[tuple[str, ...]] = ("pypdf",)

    def recognises(self, data: bytes, suffix: str) -> bool:
        return b"%PDF-" in data[:1024]

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        from pypdf import PdfReader

        pages = _open(PdfReader(io.BytesIO(data)))
        empty, damaged = list[int](), list[int]()
        for number, page in enumerate(pages.pages, 1):
            text, is_damaged = _text(page)
            (damaged if is_damaged else [] if text.strip() else empty).append(number)
            yield Section(text, f"p. {number}")
        if len(empty) == len(pages.pages):
            raise UnreadableError("is scanned: its pages are images; run OCR first (ocrmypdf)")
        if empty:
            yield Note(f"{_listed(empty)} without text; run OCR first (ocrmypdf) if these are images")
        if damaged:
            yield Note(f"{_listed(damaged)} damaged; not read, or only partly")


def _text(page: PageObject) -> tuple[str, bool]:
    """The text of a page, and whether some of it could not be read; the other pages can."""
    texts, is_damaged = list[str](), False
    for read in (_printed, _annotations):
        try:
            texts += read(page)
        except MemoryError:
            raise
        except Exception:  # whatever a damaged page makes the library raise
            is_damaged = True
    return "\n".join(texts), is_damaged


def _printed(page: PageObject) -> Iterator[str]:
    yield unhyphenated(page.extract_text())


def _annotations(page: PageObject) -> Iterator[str]:
    """A line for each filled field of a form, `name: value`, and for each comment."""
    for reference in page.get("/Annots") or ():
        annotation = reference.get_object()
        kind = annotation.get("/Subtype")
        if kind == _FIELD and (value := _inherited(annotation, "/V")) not in ("", "/Off"):
            yield f"{_inherited(annotation, '/T')}: {value.removeprefix('/')}"
        elif kind not in _LEFT_OUT and annotation.get("/Contents"):
            yield str(annotation["/Contents"])


def _inherited(field: Any, key: str) -> str:
    """An entry of a field, or of the field that it belongs to."""
    for _ in range(32):
        if (value := field.get(key)) is not None:
            value = value.get_object()
            return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        field = field.get("/Parent", {}).get_object() if "/Parent" in field else {}
    return ""


def _listed(pages: list[int]) -> str:
    return f"p. {', '.join(map(str, pages[:10]))}{f' and {len(pages) - 10:,d} more' if len(pages) > 10 else ''}"


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
