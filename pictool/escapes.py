"""Characters that steer a terminal or hide in a text, shown as escapes such as `\\x1b` wherever a terminal reads.

Texts, names and errors come from files, models and remotes, so any of them may hold an escape sequence. Every stream
that a terminal reads (`guard_streams`), all that rich draws, and every screen of the TUI show such characters instead
of sending them. What is written to files and pipes stays as it is.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

# Not among them: what scripts need to join and to order letters (U+200C to U+200F, U+061C).
_STEERING = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line feed, DEL, C1
    r"\u202a-\u202e\u2066-\u2069"  # turn the direction of what follows
    r"\u2028\u2029"  # separators of lines and paragraphs
    r"\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # take no room
    r"\ud800-\udfff"  # halves of surrogate pairs: no Unicode text
)
_IN_LINES = re.compile(f"[{_STEERING}]")
_IN_LINE = re.compile(f"[{_STEERING}\\t\\n]")
_HALVES = re.compile(r"[\ud800-\udfff]")
_CURSOR_UP = re.compile(r"(\x1b\[A)+")


def visible(text: str) -> str:
    """Return a text as one line: line breaks, tabs and all characters that steer or hide become escapes."""
    return _IN_LINE.sub(_escape, text)


def visible_lines(text: str) -> str:
    """Return a text of several lines: as `visible`, but line breaks and tabs stay."""
    return _IN_LINES.sub(_escape, text.replace("\r\n", "\n"))


def encodable(text: str) -> str:
    """Return Unicode text: halves of surrogate pairs, which names of files have that are not UTF-8, become escapes."""
    return _HALVES.sub(_escape, text)


def _escape(character: re.Match[str]) -> str:
    return character[0].encode("unicode_escape").decode()


def to_json(data: Any) -> str:
    r"""Return indented JSON whose strings hold such characters as `\u001b`; everything else is not escaped.

    Halves of surrogate pairs, which other readers of JSON refuse, become the text of their escapes.
    """
    text = _HALVES.sub(lambda half: "\\" + _escape(half), json.dumps(data, indent=2, ensure_ascii=False))
    return _IN_LINES.sub(lambda character: json.dumps(character[0])[1:-1], text)


class GuardedStream:
    """A text stream that shows characters that steer or hide instead of sending them to its terminal.

    Args:
        has_bars: libraries may draw progress bars. A carriage return at the start of a line, where it moves nothing,
            begins one; it is sent, as are those that begin the same line again, and the way up to another bar.
    """

    def __init__(self, stream: TextIO, has_bars: bool = False) -> None:
        self.unguarded = stream
        self._has_bars = has_bars
        self._is_line_start, self._is_bar = True, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self.unguarded.write(self._shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def _shown(self, text: str) -> str:
        if self._is_bar and _CURSOR_UP.fullmatch(text):
            return text
        begins_bar = self._has_bars and text[0] == "\r" and (self._is_line_start or self._is_bar)
        self._is_bar = "\n" not in text and (begins_bar or self._is_bar)
        self._is_line_start = text[-1] == "\n"
        return "\r" + visible_lines(text[1:]) if begins_bar else visible_lines(text)


def guard_streams() -> None:
    """Guard standard error, and standard output if it is a terminal; a pipe or a file gets what is written."""
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = cast("TextIO", GuardedStream(sys.stdout))
    if sys.stderr is not None:
        sys.stderr = cast("TextIO", GuardedStream(sys.stderr, has_bars=sys.stderr.isatty()))


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream below a guard, for a writer that escapes what it is given itself."""
    return stream.unguarded if isinstance(stream, GuardedStream) else stream
