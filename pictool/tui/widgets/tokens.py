"""A prompt's tokens as coloured text, of any length: a line is set once per width and drawn when it is seen."""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from pictool.tui.flow import HEADING, Flow, Shown, set_lines
from pictool.tui.widgets.inks import CURSOR, DIM, MATCH, token_style


class TokensView(ScrollView, can_focus=True):
    """The tokens, their steps as colours, a cursor on one of them, and what a search found."""

    DEFAULT_CSS = """
    TokensView { height: 1fr; overflow-x: hidden; overflow-y: scroll; padding: 0; }
    TokensView:focus { background: $surface; }
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

    class Moved(Message):
        """The cursor stands on another token."""

        def __init__(self, view: TokensView, token: int) -> None:
            super().__init__()
            self.view, self.token = view, token

        @property
        def control(self) -> TokensView:
            return self.view

    def __init__(self, shown: Shown, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.shown = shown
        self._steps = np.zeros(len(shown.pieces), dtype=np.int8)
        self._is_match = np.zeros(len(shown.pieces), dtype=bool)
        self._flow: Flow | None = None

    @property
    def flow(self) -> Flow:
        """The lines at the width that the view has now."""
        width = self.scrollable_content_region.width
        if self._flow is None or self._flow.width != max(width, 4):
            self._flow = set_lines(self.shown, width)
            self.virtual_size = Size(0, len(self._flow.lines))
        return self._flow

    def set_steps(self, steps: NDArray[np.int8]) -> None:
        self._steps = steps
        self.refresh()

    def set_matches(self, is_match: NDArray[np.bool_]) -> None:
        """Mark the tokens that a search found."""
        self._is_match = is_match
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        at = self.scroll_offset.y + y
        if at >= len(self.flow.lines):
            return Strip.blank(width, base)
        runs = groupby(self.flow.lines[at], key=lambda piece: self._style(piece[0]))
        segments = [Segment("".join(text for _, text in run), base + style) for style, run in runs]
        return Strip(segments).adjust_cell_length(width, base)

    def _style(self, token: int) -> Style:
        if token == HEADING:
            return DIM
        style = token_style(int(self._steps[token]), not self.app.no_color)
        if self._is_match[token]:
            style += MATCH
        return style + CURSOR if token == self.cursor else style

    def on_resize(self) -> None:
        if self.size.width:
            self.virtual_size = Size(0, len(self.flow.lines))
            self.reveal()

    def validate_cursor(self, token: int) -> int:
        return min(max(0, token), len(self.shown.pieces) - 1)

    def watch_cursor(self, before: int, now: int) -> None:
        """Draws the two lines anew; all of them only if the view scrolls."""
        self.reveal()
        for token in (before, now):
            self._refresh_token(token)
        self.post_message(self.Moved(self, self.cursor))

    def _refresh_token(self, token: int) -> None:
        """The line in which a token begins, and the next one."""
        y = int(self.flow.line_of[token]) - self.scroll_offset.y
        self.refresh(Region(0, max(0, y), self.size.width, 2 if y >= 0 else 1))

    def reveal(self) -> None:
        """Scroll so that the cursor is seen, with a line around it where there is room."""
        if not self.size.height or not self.size.width:
            return
        line, top, seen = int(self.flow.line_of[self.cursor]), self.scroll_offset.y, self.size.height
        margin = 1 if seen > 4 else 0
        if line < top + margin:
            self.scroll_to(y=max(0, line - margin), animate=False)
        elif line >= top + seen - margin:
            self.scroll_to(y=line - seen + 1 + margin, animate=False)

    def action_step(self, by: int) -> None:
        self.cursor += by

    def action_line(self, by: int) -> None:
        self.cursor = self.flow.beside(self.cursor, by)

    def action_page(self, by: int) -> None:
        self.action_line(by * max(1, self.size.height - 2))

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        token = None if at is None else self.flow.token_at(self.scroll_offset.y + at.y, at.x)
        if token is not None:
            self.cursor = token
