"""The base of the screens with texts: search, tabs, and moving from part to part."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from textual.binding import Binding, BindingType
from textual.widgets import Input, TabbedContent, TabPane

from pictool.tui.base import PicScreen, SearchInput
from pictool.tui.widgets.table import Choice
from pictool.tui.widgets.token_text import TokensView

LOW = 30  # lines; a terminal with fewer shows the text alone at first: f unfolds the rest


class TextScreen(PicScreen):
    """A screen with one or more views of the same tokens and tabs; the views are searched together."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "search", key_display="/"),
        Binding("n", "match(1)", "next match", show=False),
        Binding("N", "match(-1)", "match before", show=False),
        Binding("right_square_bracket", "part(1)", "next part", show=False, key_display="]"),
        Binding("left_square_bracket", "part(-1)", "part before", show=False, key_display="["),
        Binding("t", "next_tab", "tab"),
        Binding("f", "fold", "fold"),
    ]
    _matches: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # the first token of each

    @property
    def views(self) -> list[TokensView]:
        return list(self.query(TokensView))

    def action_search(self) -> None:
        self.query_one(SearchInput).open()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Mark the matches after every change; the cursor stays."""
        is_match = self.views[0].token_text.find(event.value)
        self._matches = (is_match & ~np.concatenate([[False], is_match[:-1]])).nonzero()[0]
        for view in self.views:
            view.set_matches(is_match)

    def on_input_submitted(self) -> None:
        self.views[0].focus()
        if self.views[0].cursor not in self._matches:
            self.action_match(1)

    def action_match(self, by: int) -> None:
        """Move to the next match; after the last one comes the first."""
        if not len(self._matches):
            self.pic.show_note("nothing found: / searches")
            return
        matches, cursor = self._matches, self.views[0].cursor
        index = np.searchsorted(matches, cursor, side="right") if by > 0 else np.searchsorted(matches, cursor) - 1
        self.go_to(int(matches[int(index) % len(matches)]))

    def action_part(self, by: int) -> None:
        """Move to the start of the next part that has tokens, or to the last start before the cursor."""
        text, cursor = self.views[0].token_text, self.views[0].cursor
        starts = [start for start in text.starts if start < len(text.pieces)]
        ahead = (
            [start for start in starts if start > cursor] if by > 0 else [start for start in starts if start < cursor]
        )
        if ahead:
            self.go_to(min(ahead) if by > 0 else max(ahead))

    def action_step(self, name: str, by: int) -> None:
        self.query_one(f"#{name}", Choice).step(by)

    def action_next_tab(self) -> None:
        """Show the next tab; if the pane is hidden, show that first."""
        tabs = self.query_one(TabbedContent)
        if not tabs.display:
            self.action_fold()
            return
        names = [str(pane.id) for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + 1) % len(names)]

    def action_fold(self) -> None:
        """Hide or show the pane with tabs, so that the text takes its room."""
        self.toggle_class("-folded")

    def go_to(self, token: int) -> None:
        """Move the cursor of every view to a token."""
        for view in self.views:
            view.cursor = token
