"""Texts: their encoding, and the lines and headings that name places in them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from pictool.documents.base import Section, UnreadableError

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
_LIKELY = "cp1252"  # of encodings that suit a text equally
_SAMPLE = 1 << 18  # bytes from which an encoding is guessed
_BLOCK = 4_000  # characters after which a section of a text ends at the next empty line
_MAX_BLOCK = 8_000  # and after which at the next line


def decoded(data: bytes) -> str:
    """The text of bytes: by their byte order mark, else UTF-8, else in the encoding that charset_normalizer finds.

    Raises:
        UnreadableError: no text.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding).removeprefix("\ufeff")
    if b"\0" in data[:_SAMPLE]:
        raise UnreadableError("is binary")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode(_guessed_encoding(data))


def _guessed_encoding(data: bytes) -> str:
    from charset_normalizer import from_bytes

    at = next(index for index, byte in enumerate(data) if byte > 0x7F)  # what distinguishes encodings begins here
    begin = max(0, at - _SAMPLE // 4)
    matches = from_bytes(data[begin : begin + _SAMPLE])
    best = matches.best()
    if best is None:
        raise UnreadableError("is not text in a known encoding; convert it to UTF-8")
    equal = {match.encoding for match in matches if (match.chaos, match.coherence) == (best.chaos, best.coherence)}
    return _LIKELY if _LIKELY in equal else best.encoding


def line_sections(text: str) -> Iterator[Section]:
    """Blocks of lines, which end at empty lines where they can; their place is the number of their first line."""
    lines, begin, length = list[str](), 1, 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        lines.append(line)
        length += len(line)
        if length > _MAX_BLOCK or (length > _BLOCK and not line.strip()):
            yield Section("".join(lines), f"l. {begin}")
            lines, begin, length = [], number + 1, 0
    yield Section("".join(lines), f"l. {begin}" if begin > 1 else "")
