from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pictool.documents.base import Reader, Section
from pictool.documents.texts import decoded

_HEADING = re.compile(r" {0,3}#{1,3}[ \t]+(.*?)[ \t#]*")
_FENCE = re.compile(r" {0,3}(```|~~~)")


class Markdown(Reader):
    """Markdown, a section for each heading of the first three levels. Its text looks like any other: by its name."""

    name: ClassVar[str] = "Markdown"
    modules: ClassVar[tuple[str, ...]] = ("charset_normalizer",)
    order: ClassVar[int] = 1

    def recognises(self, data: bytes, suffix: str) -> bool:
        return suffix in (".md", ".markdown", ".mdx", ".qmd", ".rmd")

    def sections(self, data: bytes) -> Iterator[Section]:
        place, lines, is_code = "", list[str](), False
        for line in decoded(data).splitlines():
            is_code ^= _FENCE.match(line) is not None
            if not is_code and (heading := _HEADING.fullmatch(line)):
                yield Section("\n".join(lines), place)
                place, lines = heading[1][:80], []
            lines.append(line)
        yield Section("\n".join(lines), place)
