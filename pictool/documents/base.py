"""What a reader is: one kind of file, recognised by its content, to sections of text that say where they are from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

MAX_FILE_BYTES = 256 << 20
MAX_INFLATED_BYTES = 256 << 20  # of all that is compressed in a file
MAX_PAGES = 5_000  # or slides, sheets, messages
MAX_TEXT = 32 << 20  # characters
HEADING, HEADING_END = "\x02", "\x03"  # around a heading in a text of `marked_sections`
_LIGATURES = {
    "\ufb00": "ff",
    "\ufb01": "fi",
    "\ufb02": "fl",
    "\ufb03": "ffi",
    "\ufb04": "ffl",
    "\ufb05": "st",
    "\ufb06": "st",
}
_DROPPED = str.maketrans(
    {"\0": None, "\u00ad": None, "\ufeff": None, "\f": "\n", "\v": "\n", "\u2028": "\n", "\u2029": "\n"}
)


class UnreadableError(Exception):
    """A file that has no text for us; says what it is, and the remedy: `is encrypted; …`."""


@dataclass(frozen=True)
class Section:
    """A part of a file's text. `place` is where it is, for people: `p. 3`, `slide 2`, a heading, `l. 120`."""

    text: str
    place: str = ""


@dataclass(frozen=True)
class Note:
    """What of a file is in no section, for people: `p. 2 has no text`."""

    text: str


class Reader(ABC):
    """Reads one kind of file. It runs in a process that can open nothing while a file is read: no file, no connection.

    Attributes:
        name: of the kind, in messages and reports.
        modules: what it imports; they are loaded before a file is read.
        order: readers are asked in this order; one that takes every text comes last.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 0

    @abstractmethod
    def recognises(self, data: bytes, suffix: str) -> bool:
        """Whether a file is of this kind.

        Args:
            suffix: of its name, in lower case (`.md`), for kinds whose content looks alike.
        """

    @abstractmethod
    def sections(self, data: bytes) -> Iterator[Section | Note]:
        """The text of a file, in its order. Raises UnreadableError; anything else that it raises is a damaged file."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to do)
        """Do what needs files or threads, once, after the modules are loaded and before a file is read."""


def normalised(text: str) -> str:
    """A text as it is compiled: lines end in `\\n` without white space before, form feeds are line ends, soft hyphens,
    byte order marks and NULs are dropped, and of several empty lines one stays.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_DROPPED)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def unhyphenated(text: str) -> str:
    """The text of a printed page: words that were divided at a line's end are joined, ligatures are letters."""
    for ligature, letters in _LIGATURES.items():
        text = text.replace(ligature, letters)
    return re.sub(r"(?<=[^\W\d_])[-\u2010]\n(?=[a-zß-ÿ])", "", text)


def marked_sections(text: str) -> Iterator[Section]:
    """A section for each heading that a text marks, and one for what is before the first."""
    for part in text.split(HEADING):
        heading, found, rest = part.partition(HEADING_END)
        place = " ".join(heading.split())[:80] if found else ""
        yield Section(heading + rest, place)
