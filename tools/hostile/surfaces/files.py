"""Altered files of every kind under `pic ask`: each is read or named, and the good ones are always linked."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import folders
import reader_cases
from commands.run import write

from hostile.judge import Case, Outcome, Step
from hostile.scene import QUERY, TEXTS
from hostile.surfaces.base import Surface, put_something_else
from hostile.values import mutate_bytes

_XML = (
    b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
    b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]><x>&b;</x>',
    b"<x>" * 50_000, b"", b"\xff\xfe<", b"<?xml version='1.0' encoding='utf-7'?><x/>",
)  # fmt: skip
NAMES = ("page.pdf", "page.docx", "page.pptx", "page.xlsx", "page.html", "page.eml", "page.ipynb", "page.md",
         "page.odt", "page.epub", "page.rtf", "page.xls", "page.msg", "page")  # fmt: skip


@cache
def honest(name: str) -> bytes:
    makers: dict[str, Callable[[], bytes]] = {
        "page.pdf": lambda: folders.pdf(["A mill.", "A town."]), "page.docx": lambda: folders.word([("A", "A mill.")]),
        "page.pptx": lambda: folders.slides(["A mill."]), "page.xlsx": lambda: folders.sheet([["a", 1], ["mill"]]),
        "page.html": lambda: folders.html([("A", "mill")]), "page.eml": lambda: folders.mail("A", "A mill."),
        "page.odt": lambda: reader_cases.open_document("text", "<text:p>A mill.</text:p>"),
        "page.epub": reader_cases.epub, "page.rtf": lambda: reader_cases.RTF,
        "page.xls": reader_cases.old_excel, "page.msg": reader_cases.outlook,
        "page.ipynb": lambda: folders.notebook(["A mill."]), "page.md": lambda: b"# A\n\nA mill.\n",
        "page": lambda: "Ein Müller mahlt.\n".encode("cp1252") * 9,
    }  # fmt: skip
    return makers[name]()


class Files(Surface):
    """A file of a kind that readers know, with other bytes, another member, or something else in its place."""

    name: ClassVar[str] = "files"
    weight: ClassVar[int] = 3

    def make(self, draw: random.Random) -> Case:
        for name, text in TEXTS.items():
            write(f"docs/{name}", text)
        name = draw.choice(NAMES)
        path, data = write(f"docs/{name}", b""), honest(name)
        if draw.random() < 0.1:
            what = put_something_else(path, draw, self.scene.root)
        elif data.startswith(b"PK") and draw.random() < 0.7:
            what = "another member"
            path.write_bytes(_with_another_member(data, draw))
        else:
            altered, what = mutate_bytes(data, draw)
            path.write_bytes(altered)
        ask = ("ask", "docs", "-q", QUERY, "-m", self.scene.model, "--store", "st", "--max-new-tokens", 2, "--json")
        return Case(f"{what}: {name}", (Step(ask, check=_is_named, must_answer=True),), stores=("st",))


def _with_another_member(archive: bytes, draw: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        member = draw.choice([name for name in file.namelist() if name.endswith((".xml", ".rels"))])
        content = draw.choice(_XML) if draw.random() < 0.5 else mutate_bytes(file.read(member), draw)[0]
    return folders.replaced(archive, member, content)


def _is_named(outcome: Outcome) -> str | None:
    """What is wrong with an answer: it must rest on the text that has the answer, and hold nothing of this machine."""
    report = json.loads(outcome.out)
    if not any(source["path"] == "docs/a.txt" for source in report["sources"]):
        return f"not from docs/a.txt, but {report['sources']}"
    return "has a file of this machine" if "root:" in outcome.out else None
