from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import Note, Reader, Section, marked_sections
from pictool.documents.office import Package, heading_styles, is_office


class Word(Reader):
    """Word, a section for each heading, then what is beside the text; tables are lines with tabs."""

    name: ClassVar[str] = "Word"

    def recognises(self, data: bytes, suffix: str) -> bool:
        return is_office(data, "word")

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        package = Package(data)
        yield from marked_sections(package.text(package.main, heading_styles(package)))
        beside = dict[str, dict[str, None]]()
        for name, text in package.attached(package.main):
            beside.setdefault(name, {})[text] = None  # pages of several kinds may have the same header
        for name, texts in beside.items():
            yield Section("\n".join(texts), name)
        yield from package.notes()
