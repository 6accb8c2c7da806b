"""Texts: their encoding, and the lines and headings that name places in them."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import suppress

from pictool.documents.base import Section, UnreadableError

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
_LIKELY = "cp1252"  # of encodings that suit a text equally, and of what is too short to tell
_SAMPLE = 1 << 18  # bytes from which an encoding is guessed
_SHORT = 8  # bytes that are not ASCII
_SURE = 2  # characters of UTF-8 for each byte that is none
_CONTROLS = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")
_META = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_BLOCK = 4_000  # characters after which a section of a text ends at the next empty line
_MAX_BLOCK = 8_000  # and after which at the next line


def decoded(data: bytes, declared: str | None = None) -> str:
    """The text of bytes: by their byte order mark, else UTF-8, also where some of it is damaged, which is U+FFFD then;
    else in the encoding that is declared, or that charset_normalizer finds.

    Raises:
        UnreadableError: no text.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, "replace").removeprefix("\ufeff")
    if b"\0" in data[:_SAMPLE]:
        return _with_nuls(data)
    with suppress(UnicodeDecodeError):
        return data.decode()
    if declared is not None:
        return data.decode(declared, "replace")
    text = data.decode(errors="replace")
    num_damaged = text.count("\ufffd")
    num_good = sum(character > "\x7f" for character in text) - num_damaged
    return text if num_good > _SURE * num_damaged else data.decode(_guessed_encoding(data), "replace")


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page names, as browsers take it; None if it names none that is known."""
    match = _META.search(data[:4096])
    with suppress(LookupError):
        name = codecs.lookup(match[1].decode()).name if match is not None else None
        return _LIKELY if name in ("iso8859-1", "ascii") else name
    return None


def _with_nuls(data: bytes) -> str:
    """UTF-16 without a byte order mark, or a text with some NULs, as logs have them after a crash."""
    even, odd = data[0:_SAMPLE:2].count(0), data[1:_SAMPLE:2].count(0)
    if max(even, odd) > len(data[:_SAMPLE]) // 5 and 20 * min(even, odd) < max(even, odd):
        with suppress(UnicodeDecodeError):
            return data.decode("utf-16-be" if even > odd else "utf-16-le")
    if not _CONTROLS.search(data):
        with suppress(UnicodeDecodeError):
            return data.decode()
    raise UnreadableError("is binary")


def _guessed_encoding(data: bytes) -> str:
    from charset_normalizer import from_bytes

    at = next(index for index, byte in enumerate(data) if byte > 0x7F)  # what distinguishes encodings begins here
    begin = max(0, at - _SAMPLE // 4)
    sample = data[begin : begin + _SAMPLE]
    if sum(byte > 0x7F for byte in sample) < _SHORT:
        return _LIKELY
    matches = from_bytes(sample)
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
