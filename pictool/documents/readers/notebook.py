from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from pictool.documents.base import Note, Reader, Section, UnreadableError
from pictool.reading import parse_json, require_shape


class Notebook(Reader):
    """A Jupyter notebook, a section for each cell: its source, and what it printed as text."""

    name: ClassVar[str] = "notebook"

    def recognises(self, data: bytes, suffix: str) -> bool:
        return data.lstrip()[:1] == b"{" and b'"nbformat"' in data and b'"cells"' in data

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        require_shape(data)
        cells = parse_json(data, has_unique_keys=False).get("cells")
        if not isinstance(cells, list):
            raise UnreadableError("has no list of cells")
        for number, cell in enumerate(cells, 1):
            outputs = cell.get("outputs") or []
            texts = [_joined(cell.get("source")), *(_joined(_output(output)) for output in outputs)]
            yield Section("\n".join(text for text in texts if text), f"cell {number}")


def _output(output: dict[str, Any]) -> Any:
    """What an output shows as text; pictures and HTML are left out."""
    data = output.get("data")
    return data.get("text/plain") if isinstance(data, dict) else output.get("text")


def _joined(lines: Any) -> str:
    if isinstance(lines, list):
        return "".join(map(str, lines))
    return lines if isinstance(lines, str) else "" if lines is None else json.dumps(lines)
