"""A text of tokens: its parts, how it is wrapped into lines, and the widget that draws it in colours.

The text may be of any length: it is wrapped once per width, and only the visible lines are drawn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.cells import chop_cells
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from pictool.escapes import visible
from pictool.trace.format import Trace
from pictool.tui.token_colors import CURSOR, DIM, MATCH, cell_width, token_style

HEADING = -1  # in place of a token
_LINE_BREAK = "↵"
_MIN_WIDTH = 4

Line = list[tuple[int, str]]  # tokens, or HEADING, with their text


@dataclass(frozen=True)
class TokenText:
    """The texts of tokens, in parts: `starts` are the parts' first tokens, `titles` the headings above them."""

    pieces: tuple[str, ...]
    starts: tuple[int, ...]
    titles: tuple[str, ...]

    @classmethod
    def of_trace(cls, trace: Trace) -> TokenText:
        """The prompt's tokens, then the generated ones."""
        pieces = (*trace.pieces, *(token.text for token in trace.generated))
        starts, names = (*trace.layout.starts, trace.layout.num_tokens), (*trace.sources, "answer")
        titles = [
            f"── {f'{index} ' if 0 < index < len(names) - 2 else ''}{visible(name)} [{start}, {end})"
            for index, (name, start, end) in enumerate(zip(names, starts, (*starts[1:], len(pieces)), strict=True))
        ]
        return cls(pieces, starts, tuple(titles))

    @classmethod
    def of_prompt(cls, trace: Trace) -> TokenText:
        """The prompt's tokens alone."""
        whole = cls.of_trace(trace)
        return cls(trace.pieces, whole.starts[:-1], whole.titles[:-1])

    @classmethod
    def of_text(cls, text: str, title: str) -> TokenText:
        """The words of a text."""
        return cls(tuple(re.findall(r"\s*\S+|\s+$", text)) or ("",), (0,), (f"── {title}",))

    def find(self, text: str) -> NDArray[np.bool_]:
        """Mark the tokens that any occurrence of a text touches, in either case; bool [tokens]."""
        is_match = np.zeros(len(self.pieces), dtype=bool)
        ends = np.cumsum([len(piece) for piece in self.pieces])
        for match in re.finditer(re.escape(text), "".join(self.pieces), re.IGNORECASE) if text else ():
            first, last = np.searchsorted(ends, [match.start(), match.end() - 1], side="right")
            is_match[first : last + 1] = True
        return is_match

    def wrap(self, width: int) -> WrappedText:
        """Break the text into lines between tokens; a token that is wider than a line is cut."""
        lines, line_of, width = list[Line](), list[int](), max(width, _MIN_WIDTH)
        for title, start, end in zip(self.titles, self.starts, (*self.starts[1:], len(self.pieces)), strict=True):
            lines.append([(HEADING, chop_cells(title, width)[0])])
            used = width + 1  # no room: the next token begins a line
            for token in range(start, end):
                line_of.append(-1)
                for text in _texts(self.pieces[token]):
                    for part in chop_cells(text, width) or [""]:
                        if used + cell_width(part) > width:
                            lines.append([])
                            used = 0
                        if line_of[token] < 0:
                            line_of[token] = len(lines) - 1
                        lines[-1].append((token, part))
                        used += cell_width(part)
                    if text.endswith(_LINE_BREAK):
                        used = width + 1
        return WrappedText(width, lines, np.asarray(line_of, dtype=np.int64))


def _texts(piece: str) -> list[str]:
    """The text of a token, cut after each line break, which is seen."""
    *ended, last = piece.split("\n")
    return [*(visible(part) + _LINE_BREAK for part in ended), *([visible(last)] if last or not ended else [])]


@dataclass(frozen=True)
class WrappedText:
    """A text in lines of a width, headings among them; `line_of` is int64 [tokens], the line where a token starts."""

    width: int
    lines: list[Line]
    line_of: NDArray[np.int64]

    def token_at(self, line: int, column: int) -> int | None:
        """Return the token in a cell, or the line's last one if the cell is after it; None on a heading or outside."""
        if not 0 <= line < len(self.lines) or not self.lines[line] or self.lines[line][0][0] == HEADING:
            return None
        end = 0
        for token, text in self.lines[line]:
            end += cell_width(text)
            if column < end:
                return token
        return self.lines[line][-1][0]

    def column_of(self, token: int) -> int:
        """Return the column where a token starts in its line."""
        column = 0
        for other, text in self.lines[int(self.line_of[token])]:
            if other == token:
                break
            column += cell_width(text)
        return column

    def below(self, token: int, num_lines: int) -> int:
        """Return the token that is `num_lines` below a token (above, if negative), close to its column."""
        column, last = self.column_of(token), len(self.lines) - 1
        target = min(max(int(self.line_of[token]) + num_lines, 0), last)
        down, up = range(target, last + 1), range(target, -1, -1)
        for line in (*down, *up) if num_lines > 0 else (*up, *down):
            if (other := self.token_at(line, column)) is not None:
                return other
        return token


class TokensView(ScrollView, can_focus=True):
    """Draws tokens with colours, a cursor on one of them, and the matches of a search."""

    DEFAULT_CSS = """
    TokensView { height: 1fr; overflow-x: hidden; overflow-y: scroll; padding: 0; }
    TokensView:focus { background: $surface; }
    """
    HELP = """\
    Positions read 5+11: token 11 of chunk 5 (chunks from 1, tokens from 0); head+0, tail+2, answer+0.
    A cell of a map shows the largest of its tokens; a token is plain under a tenth of the largest number.
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "token before", show=False),
        Binding("right", "step(1)", "next token", show=False),
        Binding("up", "line(-1)", "line above", show=False),
        Binding("down", "line(1)", "line below", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "step(-1000000000)", "first token", show=False),
        Binding("end", "step(1000000000)", "last token", show=False),
    ]
    cursor = reactive(0)
    _wrapped: WrappedText | None = None

    class Moved(Message):
        """The cursor moved to another token."""

        def __init__(self, view: TokensView, token: int) -> None:
            super().__init__()
            self.view, self.token = view, token

    def __init__(self, token_text: TokenText) -> None:
        super().__init__()
        self.token_text, count = token_text, len(token_text.pieces)
        self._steps, self._is_match = np.zeros(count, dtype=np.int8), np.zeros(count, dtype=bool)

    @property
    def wrapped(self) -> WrappedText:
        """The lines at the view's current width."""
        width = max(self.scrollable_content_region.width, _MIN_WIDTH)
        if self._wrapped is None or self._wrapped.width != width:
            self._wrapped = self.token_text.wrap(width)
            self.virtual_size = Size(0, len(self._wrapped.lines))
        return self._wrapped

    def set_steps(self, steps: NDArray[np.int8]) -> None:
        """Colour the tokens by steps or marks [tokens] (see `token_style`)."""
        self._steps = steps
        self.refresh()

    def set_matches(self, is_match: NDArray[np.bool_]) -> None:
        """Mark the tokens that a search matched."""
        self._is_match = is_match
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        line = self.scroll_offset.y + y
        if line >= len(self.wrapped.lines):
            return Strip.blank(width, base)
        groups = groupby(self.wrapped.lines[line], key=lambda piece: self._style(piece[0]))
        segments = [Segment("".join(text for _, text in group), base + style) for style, group in groups]
        return Strip(segments).adjust_cell_length(width, base)

    def _style(self, token: int) -> Style:
        if token == HEADING:
            return DIM
        style = token_style(int(self._steps[token]), not self.app.no_color)
        if self._is_match[token]:
            style += MATCH
        return style + CURSOR if token == self.cursor else style

    def on_resize(self) -> None:
        self.watch_cursor()

    def validate_cursor(self, token: int) -> int:
        return min(max(0, token), len(self.token_text.pieces) - 1)

    def watch_cursor(self) -> None:
        """Scroll until the cursor is visible, with a line above and below it where there is room."""
        if self.size.height and self.size.width:  # else hidden
            line, top, height = int(self.wrapped.line_of[self.cursor]), self.scroll_offset.y, self.size.height
            margin = 1 if height > 4 else 0
            first, last = line - height + 1 + margin, line - margin
            self.scroll_to(y=max(0, min(max(top, first), last)), animate=False)
        self.refresh()
        self.post_message(self.Moved(self, self.cursor))

    def action_step(self, by: int) -> None:
        self.cursor += by

    def action_line(self, by: int) -> None:
        self.cursor = self.wrapped.below(self.cursor, by)

    def action_page(self, by: int) -> None:
        self.action_line(by * max(1, self.size.height - 2))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        token = None if offset is None else self.wrapped.token_at(self.scroll_offset.y + offset.y, offset.x)
        if token is not None:
            self.cursor = token
