from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import Reader, Section
from pictool.documents.texts import decoded

_BEGIN = re.compile(
    r"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
_HIDDEN = ("script", "style", "noscript", "template", "svg", "iframe", "nav")
_BLOCKS = (
    "address article aside blockquote br dd div dl dt figcaption figure footer form h4 h5 h6 header hr li main ol p "
    "pre section table tr ul"
)  # fmt: skip
_HEADING, _BREAK = "\x02", "\x03"


class Html(Reader):
    """HTML, a section for each heading of the first three levels; scripts, styles and navigation are left out."""

    name: ClassVar[str] = "HTML"
    modules: ClassVar[tuple[str, ...]] = ("selectolax.lexbor", "charset_normalizer")

    def recognises(self, data: bytes, suffix: str) -> bool:
        return bool(
            _BEGIN.match(
                data[:4096].decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1", "replace")
            )
        )

    def sections(self, data: bytes) -> Iterator[Section]:
        yield from html_sections(decoded(data))


def html_sections(source: str) -> Iterator[Section]:
    """The sections of a page, whose text is that of its blocks, a line each."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(source.replace(_HEADING, "").replace(_BREAK, ""))
    tree.strip_tags(list(_HIDDEN))
    for node in tree.css("h1, h2, h3"):
        node.insert_before(_HEADING)
        node.insert_after(_BREAK)
    for node in tree.css(", ".join(_BLOCKS.split())):
        node.insert_before("\n")
        node.insert_after("\n")
    for node in tree.css("td, th"):
        node.insert_after("\t")
    body = tree.body
    for part in (body.text() if body is not None else "").split(_HEADING):
        heading, found, rest = part.partition(_BREAK)
        lines = [" ".join(line.split()) for line in (f"{heading}\n{rest}" if found else part).splitlines()]
        yield Section("\n".join(line for line in lines if line), " ".join(heading.split())[:80] if found else "")
