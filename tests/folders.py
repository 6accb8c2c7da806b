"""Files of every kind, made on the spot: good ones, and those that cannot be read, with what is said of them."""

from __future__ import annotations

import io
import json
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from email.message import EmailMessage

import docx
import openpyxl
import pptx
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas


def pdf(pages: Sequence[str], password: str | None = None, owner: str | None = None) -> bytes:
    out = io.BytesIO()
    from reportlab.lib.pdfencrypt import StandardEncryption

    encrypt = None if password is None else StandardEncryption(password, owner or "owner", strength=128)
    canvas = Canvas(out, encrypt=encrypt)
    for page in pages:
        for at, line in enumerate(line for part in page.splitlines() for line in textwrap.wrap(part, 90)):
            canvas.drawString(40, 800 - 14 * at, line)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def scanned() -> bytes:
    """A PDF of two pictures of pages."""
    from PIL import Image

    out = io.BytesIO()
    canvas = Canvas(out)
    for shade in (40, 200):
        canvas.drawImage(ImageReader(Image.new("L", (60, 80), shade)), 0, 0, 595, 842)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def word(parts: Sequence[tuple[str, str]]) -> bytes:
    """Headings with a paragraph each."""
    document = docx.Document()
    for heading, text in parts:
        document.add_heading(heading, 1)
        document.add_paragraph(text)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def slides(texts: Sequence[str]) -> bytes:
    deck = pptx.Presentation()
    for text in texts:
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.placeholders[1].text = text
    out = io.BytesIO()
    deck.save(out)
    return out.getvalue()


def sheet(rows: Sequence[Sequence[object]]) -> bytes:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(list(row))
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


def html(parts: Sequence[tuple[str, str]]) -> bytes:
    body = "".join(f"<h2>{heading}</h2><p>{text}</p>" for heading, text in parts)
    return f"<!doctype html><head><style>p {{}}</style></head><body><script>x()</script>{body}</body>".encode()


def mail(subject: str, text: str) -> bytes:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "nava@example.org", "viro@example.org", subject
    message.set_content(text)
    message.add_attachment(b"x", maintype="application", subtype="pdf", filename="plan.pdf")
    return bytes(message)


def notebook(cells: Sequence[str]) -> bytes:
    listed = [{"cell_type": "markdown", "source": [cell]} for cell in cells]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": listed}).encode()


def zip_bomb(member: str = "word/document.xml", size: int = 1 << 29) -> bytes:
    """A small archive with a member of twice what a reader may inflate."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("[Content_Types].xml", "<x/>")
        with archive.open(member, "w", force_zip64=True) as file:
            for _ in range(size >> 24):
                file.write(bytes(1 << 24))
    return out.getvalue()


def replaced(archive: bytes, member: str, content: bytes) -> bytes:
    """An archive with another content of one member."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, content if name == member else old.read(name))
    return out.getvalue()


# Names and contents of files that cannot be read, and a part of what is said of each.
BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "locked.pdf": (lambda: pdf(["a"], "secret"), "is encrypted"),
    "scan.pdf": (scanned, "is scanned"),
    "cut.pdf": (lambda: pdf(["a"])[:300], "is damaged"),
    "cut.docx": (lambda: word([("A", "b")])[:3000], "is a damaged archive"),
    "cut.xlsx": (lambda: sheet([["a"]])[:3000], "is a damaged archive"),
    "bad.pptx": (lambda: replaced(slides(["a"]), "ppt/presentation.xml", b"<p:x"), "is damaged"),
    "old.doc": (lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512), "is a compound file"),
    "empty.txt": (lambda: b"", "is empty"),
    "blank.html": (lambda: b"<html><body><script>x</script></body></html>", "has no text"),
    "photo.png": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(64), "is a picture"),
    "noise.bin": (lambda: bytes(range(256)) * 8, "is binary"),
    "things.zip": (lambda: zip_bomb("a.txt", 1 << 24), "is an archive"),
}
