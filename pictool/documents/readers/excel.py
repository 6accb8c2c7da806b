from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import Note, Section
from pictool.documents.extraction import Extracting, extract
from pictool.documents.office import Package, is_office

_MIME = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
_BINARY = "application/vnd.ms-excel.sheet.binary.macroEnabled.12"
_NO_VALUE = re.compile(rb"</f>\s*(?:<v\s*/>|<v>\s*</v>)?\s*</c>")


class Excel(Extracting):
    """Excel, a section for each sheet: rows as lines with tabs, values as they were last computed. No macro runs.

    Comments and charts of a sheet follow in a section of the same name.
    """

    name: ClassVar[str] = "Excel"

    def recognises(self, data: bytes, suffix: str) -> bool:
        return is_office(data, "xl")

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        package = Package(data)
        is_binary = package.main.endswith(".bin")
        result = extract(data, _BINARY if is_binary else _MIME, has_structure=False)
        for table in result.tables:
            lines = ["\t".join(" ".join(cell.split()) for cell in row).rstrip("\t") for row in table.cells]
            yield Section("\n".join(filter(None, lines)), result.metadata["sheet_names"][table.page_number - 1])
        if not is_binary:
            yield from _beside(package)


def _beside(package: Package) -> Iterator[Section | Note]:
    """What of the sheets is in no cell, and cells whose formula was never computed."""
    related, num_empty = package.related(package.main), 0
    for sheet in package.root(package.main).iterfind("{*}sheets/{*}sheet"):
        _, part = related[next(name for key, name in sheet.items() if key.endswith("}id"))]
        yield Section("\n".join(text for _, text in package.attached(part)), sheet.get("name", ""))
        num_empty += len(_NO_VALUE.findall(package.read(part)))
    if num_empty:
        yield Note(f"{num_empty:,d} cells have a formula but no value; open and save the file in Excel")
    yield from package.notes()
