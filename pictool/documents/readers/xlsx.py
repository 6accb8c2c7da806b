from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.archives import has_member, open_office
from pictool.documents.base import MAX_TEXT, Reader, Section, UnreadableError


class Xlsx(Reader):
    """Excel, a section for each sheet: rows as lines with tabs, values as they were last computed. No macro runs."""

    name: ClassVar[str] = "Excel"
    modules: ClassVar[tuple[str, ...]] = ("openpyxl",)

    def recognises(self, data: bytes, suffix: str) -> bool:
        return has_member(data, "xl/workbook.xml")

    def sections(self, data: bytes) -> Iterator[Section]:
        from openpyxl import load_workbook

        book = load_workbook(open_office(data), read_only=True, data_only=True, keep_links=False)
        for sheet in book.worksheets:
            lines, length = list[str](), 0
            for row in sheet.iter_rows(values_only=True):
                line = "\t".join("" if value is None else str(value) for value in row).rstrip("\t")
                length += len(line) + len(row)  # a sheet may have a million empty cells in each row
                if length > MAX_TEXT:
                    raise UnreadableError(
                        f"sheet {sheet.title[:40]}: has more than {MAX_TEXT >> 20} MiB of text; split it"
                    )
                lines += [line] if line else []
            yield Section("\n".join(lines), sheet.title[:80])
