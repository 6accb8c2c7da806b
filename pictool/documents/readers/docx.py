from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.archives import has_member, open_office
from pictool.documents.base import Reader, Section


class Docx(Reader):
    """Word, a section for each heading; tables are lines with tabs."""

    name: ClassVar[str] = "Word"
    modules: ClassVar[tuple[str, ...]] = ("docx",)

    def recognises(self, data: bytes, suffix: str) -> bool:
        return has_member(data, "word/document.xml")

    def sections(self, data: bytes) -> Iterator[Section]:
        from docx import Document
        from docx.table import Table

        place, lines = "", list[str]()
        for block in Document(open_office(data)).iter_inner_content():
            if isinstance(block, Table):
                lines += ["\t".join(cell.text for cell in row.cells) for row in block.rows]
                continue
            if block.style is not None and (block.style.name or "").startswith(("Heading", "Title")):
                yield Section("\n".join(lines), place)
                place, lines = block.text[:80], []
            lines.append(block.text)
        yield Section("\n".join(lines), place)
