from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from pictool.documents.archives import has_member, open_office
from pictool.documents.base import MAX_PAGES, Reader, Section, UnreadableError


class Pptx(Reader):
    """PowerPoint, a section for each slide with its notes."""

    name: ClassVar[str] = "PowerPoint"
    modules: ClassVar[tuple[str, ...]] = ("pptx",)

    def recognises(self, data: bytes, suffix: str) -> bool:
        return has_member(data, "ppt/presentation.xml")

    def sections(self, data: bytes) -> Iterator[Section]:
        from pptx import Presentation

        slides = Presentation(open_office(data)).slides
        if len(slides) > MAX_PAGES:
            raise UnreadableError(f"has more than {MAX_PAGES:,d} slides; split it")
        for number, slide in enumerate(slides, 1):
            lines = list(_texts(slide.shapes))
            if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) is not None:
                lines.append(notes.text)
            yield Section("\n".join(line for line in lines if line.strip()), f"slide {number}")


def _texts(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _texts(shape.shapes)
        elif shape.has_text_frame:
            yield shape.text_frame.text
        elif getattr(shape, "has_table", False):
            yield from ("\t".join(cell.text for cell in row.cells) for row in shape.table.rows)
