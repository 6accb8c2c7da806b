"""Tokens set into lines of a width: which token stands in which cell. Pure; what a view of 32,000 tokens draws from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from rich.cells import chop_cells

from pictool.trace.format import Trace
from pictool.trace.labels import visible
from pictool.tui.widgets.inks import cells

HEADING = -1
_BREAK = "↵"


@dataclass(frozen=True)
class Shown:
    """Pieces of text in parts: `starts` are those of the parts, `titles` stand above them."""

    pieces: tuple[str, ...]
    starts: tuple[int, ...]
    titles: tuple[str, ...]

    @classmethod
    def of(cls, trace: Trace) -> Shown:
        """The prompt's tokens, then those that were generated."""
        pieces = (*trace.pieces, *(one.text for one in trace.generated))
        starts, names = (*trace.layout.starts, trace.layout.num_tokens), (*trace.sources, "answer")
        titles = [
            f"── {f'{index} ' if 0 < index < len(names) - 2 else ''}{visible(name)} [{start}, {end})"
            for index, (name, start, end) in enumerate(zip(names, starts, (*starts[1:], len(pieces)), strict=True))
        ]
        return cls(pieces, starts, tuple(titles))

    @classmethod
    def of_prompt(cls, trace: Trace) -> Shown:
        """The prompt's tokens alone."""
        whole = cls.of(trace)
        return cls(trace.pieces, whole.starts[:-1], whole.titles[:-1])

    @classmethod
    def of_text(cls, text: str, title: str) -> Shown:
        """A text, by its words."""
        return cls(tuple(re.findall(r"\s*\S+|\s+$", text)) or ("",), (0,), (f"── {title}",))

    def find(self, text: str) -> NDArray[np.bool_]:
        """Which pieces a text touches, wherever it occurs; case does not matter. bool [pieces]."""
        found = np.zeros(len(self.pieces), dtype=bool)
        ends = np.cumsum([len(piece) for piece in self.pieces])
        for match in re.finditer(re.escape(text), "".join(self.pieces), re.IGNORECASE) if text else ():
            first, last = np.searchsorted(ends, [match.start(), match.end() - 1], side="right")
            found[first : last + 1] = True
        return found


Line = list[tuple[int, str]]


@dataclass(frozen=True)
class Flow:
    """Lines of (token, text), headings among them; `line_of` is int64 [tokens], where a token begins."""

    width: int
    lines: list[Line]
    line_of: NDArray[np.int64]

    def token_at(self, line: int, column: int) -> int | None:
        """The token in a cell, or the line's last if the cell is behind it; None on a heading or outside."""
        if not 0 <= line < len(self.lines) or not self.lines[line] or self.lines[line][0][0] == HEADING:
            return None
        end = 0
        for token, text in self.lines[line]:
            end += cells(text)
            if column < end:
                return token
        return self.lines[line][-1][0]

    def column_of(self, token: int) -> int:
        """Where a token begins in its line."""
        at = 0
        for other, text in self.lines[int(self.line_of[token])]:
            if other == token:
                break
            at += cells(text)
        return at

    def beside(self, token: int, lines: int) -> int:
        """The token `lines` below a token (above, if negative), as near to its column as there is one."""
        column, last = self.column_of(token), len(self.lines) - 1
        at = min(max(int(self.line_of[token]) + lines, 0), last)
        onward, back = range(at, last + 1), range(at, -1, -1)
        for line in (*onward, *back) if lines > 0 else (*back, *onward):
            if (found := self.token_at(line, column)) is not None:
                return found
        return token


def set_lines(shown: Shown, width: int) -> Flow:
    """Break the text at tokens; a token that is wider than a line is cut."""
    setter = _Setter(max(width, 4))
    spans = zip(shown.titles, shown.starts, (*shown.starts[1:], len(shown.pieces)), strict=True)
    for title, start, end in spans:
        setter.heading(title)
        for token in range(start, end):
            setter.add(token, shown.pieces[token])
    setter.end()
    return Flow(setter.width, setter.lines, np.asarray(setter.line_of, dtype=np.int64))


@dataclass
class _Setter:
    width: int
    lines: list[Line] = field(default_factory=list)
    line_of: list[int] = field(default_factory=list)
    _line: Line = field(default_factory=list)
    _used: int = 0

    def heading(self, text: str) -> None:
        self.end()
        self.lines.append([(HEADING, chop_cells(text, self.width)[0])])

    def add(self, token: int, piece: str) -> None:
        self.line_of.append(-1)
        if piece.isascii() and piece.isprintable():
            return self._place(token, piece)
        parts = piece.split("\n")
        for part in parts[:-1]:
            self._place(token, visible(part) + _BREAK)
            self.end()
        if parts[-1] or len(parts) == 1:
            self._place(token, visible(parts[-1]))
        return None

    def _place(self, token: int, text: str) -> None:
        size = cells(text)
        if self._used and self._used + size > self.width:
            self.end()
        for part in chop_cells(text, self.width) if size > self.width else [text]:
            if self._used and self._used + cells(part) > self.width:
                self.end()
            if self.line_of[token] < 0:
                self.line_of[token] = len(self.lines)
            self._line.append((token, part))
            self._used += cells(part)

    def end(self) -> None:
        """End the line that is begun."""
        if self._line:
            self.lines.append(self._line)
        self._line, self._used = [], 0
