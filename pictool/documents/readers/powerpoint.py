from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import MAX_PAGES, Note, Reader, Section, UnreadableError
from pictool.documents.office import Package, is_office


class PowerPoint(Reader):
    """PowerPoint, a section for each slide with its charts, diagrams, comments and notes."""

    name: ClassVar[str] = "PowerPoint"

    def recognises(self, data: bytes, suffix: str) -> bool:
        return is_office(data, "ppt")

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        package = Package(data)
        slides = package.root(package.main).findall("{*}sldIdLst/{*}sldId")
        if len(slides) > MAX_PAGES:
            raise UnreadableError(f"has more than {MAX_PAGES:,d} slides; split it")
        related = package.related(package.main)
        for number, slide in enumerate(slides, 1):
            _, part = related[next(name for key, name in slide.items() if key.endswith("}id"))]
            texts = [package.text(part), *(text for _, text in package.attached(part))]
            lines = [line for text in texts for line in text.splitlines() if line.strip()]
            yield Section("\n".join(lines), f"slide {number}")
        yield from package.notes()
