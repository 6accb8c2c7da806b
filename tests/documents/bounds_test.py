"""Hostile files: what a reader takes too much time or memory for ends, and the next file is read."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import reader_cases

from pictool.bounded_process import BoundedProcess, ProcessFailure
from pictool.documents.reading import FileReader


def looping_pdf() -> bytes:
    """Pages that are their own children, and an object that is its own length."""
    return (
        b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
        b"2 0 obj<</Type/Pages/Kids[2 0 R 2 0 R]/Count 9>>endobj\n"
        b"3 0 obj<</Length 3 0 R>>stream\nx\nendstream endobj\ntrailer<</Root 1 0 R/Prev 0>>\nstartxref\n0\n%%EOF"
    )


def inflating_pdf() -> bytes:
    """A page whose content is twice as many zeros as a reader may inflate, deflated twice."""
    once = zlib.compress(bytes(1 << 29), 1)
    stream = zlib.compress(once, 9)
    head = b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    page = b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R>>endobj\n"
    body = (
        b"4 0 obj<</Length %d/Filter[/FlateDecode/FlateDecode]>>stream\n" % len(stream)
        + stream
        + b"\nendstream endobj\n"
    )
    return head + page + body + b"trailer<</Root 1 0 R>>\nstartxref\n0\n%%EOF"


ENTITY = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/hostname">]>'
BOMB = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaaaaaaaa">' + b"".join(
    b'<!ENTITY %c "%s">' % (name, b"&%c;" % (name - 1) * 16) for name in b"bcdefghi"
)
BODY = (
    b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body><w:p><w:r>'
    b"<w:t>secret: &%c;</w:t></w:r></w:p></w:body></w:document>"
)
WORD = folders.word([("A", "b")])
HOSTILE: dict[str, Callable[[], bytes]] = {
    "a zip bomb": folders.zip_bomb,
    "a zip bomb of sheets": lambda: folders.zip_bomb("xl/workbook.xml"),
    "an external entity": lambda: folders.replaced(WORD, "word/document.xml", ENTITY + BODY % ord("e")),
    "entities of entities": lambda: folders.replaced(WORD, "word/document.xml", BOMB + b"]>" + BODY % ord("i")),
    "deep HTML": lambda: b"<html>" + b"<div><b>" * 300_000 + b"deep",
    "deep XML": lambda: folders.replaced(WORD, "word/document.xml", b"<a>" * 200_000),
    "deep JSON": lambda: b'{"nbformat": 4, "cells": ' + b"[" * 100_000,
    "a PDF that is its own page": looping_pdf,
    "a PDF of zeros": inflating_pdf,
    "a zip bomb of a book": lambda: folders.zip_bomb("mimetypeapplication/epub+zip"),
    "deep RTF": lambda: b"{\\rtf1" + b"{" * 1_000_000,
    "a damaged sheet": lambda: folders.replaced(folders.sheet([["a"]]), "xl/worksheets/sheet1.xml", b"<a>" * 200_000),
    "a compound file of nothing": lambda: (
        reader_cases.old_excel()[:512].ljust(1 << 20, b"\xff") + "WordDocument".encode("utf-16-le")
    ),
    "a PDF of nothing but brackets": lambda: b"%PDF-1.4\n" + b"<<" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_next_file_is_read_and_nothing_else_is(name: str) -> None:
    Path("hostile").write_bytes(HOSTILE[name]())
    Path("good.txt").write_text("As ever.")
    with FileReader(limit_s=5) as reader:
        document = reader.read(Path("hostile"))
        assert reader.read(Path("good.txt")).sections[0].text == "As ever."
    text = "".join(section.text for section in document.sections).strip()
    assert document.problem or text in ("secret:", "deep"), text[:80]
    assert Path("/etc/hostname").read_text().strip() not in text + document.problem


READER = """
from typing import ClassVar
import os, socket, time
from pictool.documents.base import Reader, Section

class Curious(Reader):
    name: ClassVar[str] = "curious"

    def recognises(self, data, suffix):
        return data.startswith(b"curious")

    def sections(self, data):
        deed = data.split()[1].decode()
        if deed == "sleep":
            time.sleep(600)
        if deed == "fill":
            bytes(1 << 40)
        if deed == "exit":
            os._exit(3)
        for action in (lambda: open("/etc/hostname"), socket.socket, lambda: os.popen("id"), os.pipe):
            try:
                action()
            except OSError as error:
                yield Section(error.strerror, str(action))
            else:
                yield Section("was opened")
"""


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package with a reader, by its entry point."""
    site = Path("site").absolute()
    (site / "curious-1.dist-info").mkdir(parents=True)
    (site / "curious.py").write_text(READER)
    (site / "curious-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: curious\nVersion: 1\n")
    (site / "curious-1.dist-info" / "entry_points.txt").write_text("[pictool.readers]\ncurious = curious:Curious\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])


@pytest.mark.usefixtures("plugin")
def test_a_reader_of_another_package_can_open_nothing_and_is_ended_where_it_does_not_end() -> None:
    said = {}
    with FileReader(limit_s=3) as reader:
        for deed in ("open", "sleep", "fill", "exit", "open again"):
            Path(deed).write_text(f"curious {deed}")
            said[deed] = reader.read(Path(deed))
    assert [section.text for section in said["open"].sections] == ["Too many open files"] * 4
    assert "longer than 3 s" in said["sleep"].problem and "memory" in said["fill"].problem
    assert "(3)" in said["exit"].problem and said["open again"].reader == "curious"


def test_a_module_that_is_none_is_said() -> None:
    process = BoundedProcess("no_such_module", 1, 1 << 30)
    with pytest.raises(ProcessFailure):
        process.ask({})
    process.close()
