from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import HEADING, HEADING_END, Note, Reader, Section, marked_sections
from pictool.documents.texts import declared_encoding, decoded

# Atomic: of many comments, none is tried in another way.
_BEGIN = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*)?(?>(?:<!--.*?-->\s*)*)<(?:!doctype\s+html|html|head|body|meta|title)\b", re.I | re.S
)
_TAG = re.compile(r"\s*<[a-z!?]", re.I)
_NAMES = (".htm", ".html", ".xhtml")
_HIDDEN = ("script", "style", "noscript", "template", "svg", "iframe", "nav", "title")
_BLOCKS = (
    "address article aside blockquote br dd div dl dt figcaption figure footer form h4 h5 h6 header hr legend li main "
    "ol option p pre section summary table tr ul"
)  # fmt: skip
_CELL, _BLANK, _LINE = "\x04", "\x05", "\x06"  # the end of a cell; what white space was in preformatted text
_MARKS = str.maketrans("", "", HEADING + HEADING_END + _CELL + _BLANK + _LINE)
_PREFORMATTED = str.maketrans({" ": _BLANK, "\n": _LINE, "\t": _BLANK * 4})
_RESTORED = str.maketrans({_BLANK: " ", _LINE: "\n"})


class Html(Reader):
    """HTML, a section for each heading of the first three levels; scripts, styles and navigation are left out.

    A fragment is known by its name, since texts and source code begin with tags, too.
    """

    name: ClassVar[str] = "HTML"
    modules: ClassVar[tuple[str, ...]] = ("selectolax.lexbor", "charset_normalizer")

    def recognises(self, data: bytes, suffix: str) -> bool:
        is_wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        begin = data.decode("utf-16" if is_wide else "latin-1", "replace").removeprefix("\xef\xbb\xbf")
        return bool(_BEGIN.match(begin) or (suffix in _NAMES and _TAG.match(begin)))

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        yield from html_sections(decoded(data, declared_encoding(data)))


def html_sections(source: str) -> Iterator[Section]:
    """The sections of a page, whose text is that of its blocks, a line each, with tabs between cells."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(source.translate(_MARKS))
    tree.strip_tags(list(_HIDDEN))
    for node in tree.css("pre"):
        node.replace_with(f"\n{node.text().translate(_PREFORMATTED)}\n")
    for node in tree.css("h1, h2, h3"):
        node.insert_before(HEADING)
        node.insert_after(HEADING_END + "\n")
    for node in tree.css(", ".join(_BLOCKS.split())):
        node.insert_before("\n")
        node.insert_after("\n")
    for node in tree.css("td, th"):
        node.insert_after(_CELL)
    body = tree.body
    for section in marked_sections(body.text() if body is not None else ""):
        lines = [" ".join(line.split()) for line in section.text.splitlines()]
        text = "\n".join(re.sub(f" *{_CELL} *", "\t", line) for line in lines if line)
        yield Section(text.translate(_RESTORED), section.place)
