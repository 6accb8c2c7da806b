from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import Note, Reader, Section
from pictool.documents.texts import decoded

_HEADING = re.compile(r" {0,3}#{1,3}[ \t]+(.*?)[ \t#]*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class Markdown(Reader):
    """Markdown, a section for each heading of the first three levels. Its text looks like any other: by its name."""

    name: ClassVar[str] = "Markdown"
    modules: ClassVar[tuple[str, ...]] = ("charset_normalizer",)
    order: ClassVar[int] = 1

    def recognises(self, data: bytes, suffix: str) -> bool:
        return suffix in (".md", ".markdown", ".mdx", ".qmd", ".rmd")

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        place, lines, opened = "", list[str](), ""
        for line in decoded(data).splitlines():
            fence = _FENCE.match(line)
            if fence is not None and not opened:
                opened = fence[1]
            elif fence is not None and fence[1].startswith(opened):
                opened = ""
            elif not opened and (heading := _HEADING.fullmatch(line)):
                yield Section("\n".join(lines), place)
                place, lines = heading[1][:80], []
            lines.append(line)
        yield Section("\n".join(lines), place)
