"""The base of the screens with texts: search, and moving from part to part."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import Input, TabbedContent, TabPane

from pictool.tui.base import PicScreen, SearchInput
from pictool.tui.widgets.picker import Picker
from pictool.tui.widgets.token_text import TokensView


class TextScreen(PicScreen):
    """A screen with one or more views of the same tokens and tabs; the views are searched together."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "search", key_display="/"),
        Binding("n", "match(1)", "next match", show=False),
        Binding("N", "match(-1)", "match before", show=False),
        Binding("right_square_bracket", "part(1)", "next part", show=False, key_display="]"),
        Binding("left_square_bracket", "part(-1)", "part before", show=False, key_display="["),
        Binding("f", "fold", "fold"),
    ]
    _matches: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # the first token of each

    @property
    def views(self) -> list[TokensView]:
        return list(self.query(TokensView))

    @property
    def shown_views(self) -> list[TokensView]:
        """The views that are not hidden for want of room."""
        return [view for view in self.views if view.parent is None or all(node.display for node in view.ancestors)]

    @property
    def search(self) -> SearchInput:
        return self.query_one(SearchInput)

    def on_resize(self, event: events.Resize) -> None:
        """Lay the sliders out again: their width depends on the terminal's."""
        for picker in self.query(Picker):
            picker.refresh(layout=True)

    def action_search(self) -> None:
        self.search.open()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Mark the matches after every change; the cursor stays."""
        if event.input is not self.search:
            return
        is_match = self.views[0].token_text.find(event.value)
        starts = is_match & ~np.concatenate([[False], is_match[:-1]])
        self._matches = starts.nonzero()[0]
        for view in self.views:
            view.set_matches(is_match)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input is self.search:
            for view in self.shown_views[:1]:
                view.focus()
            if self.views[0].cursor not in self._matches:
                self.action_match(1)

    def action_match(self, by: int) -> None:
        """Move to the next match; after the last one comes the first."""
        if not len(self._matches):
            self.pic.tell("nothing found" if self.search.value else "search with /")
            return
        matches, cursor = self._matches, self.views[0].cursor
        index = np.searchsorted(matches, cursor, side="right") if by > 0 else np.searchsorted(matches, cursor) - 1
        self.go_to(int(matches[int(index) % len(matches)]))

    def action_part(self, by: int) -> None:
        """Move to the start of the next part that has tokens, or to the last start before the cursor."""
        text, cursor = self.views[0].token_text, self.views[0].cursor
        starts = sorted({start for start in text.starts if start < len(text.pieces)})
        if by > 0:
            target = next((start for start in starts if start > cursor), None)
        else:
            target = next((start for start in reversed(starts) if start < cursor), None)
        if target is not None:
            self.go_to(target)

    def action_next_tab(self) -> None:
        tabs = self.query_one(TabbedContent)
        names = [str(pane.id) for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + 1) % len(names)]

    def action_fold(self) -> None:
        """Hide or show the pane with tabs, so that the text takes its room."""
        self.toggle_class("-folded")
        self.on_folded()

    def on_folded(self) -> None:
        """Lay out what depends on the room for texts."""

    def go_to(self, token: int) -> None:
        """Move the cursor of every view to a token."""
        for view in self.views:
            view.cursor = token
