"""Screens with texts: search, and going from part to part."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import Input

from pictool.tui.base import PicScreen, SearchInput
from pictool.tui.widgets.picker import Picker
from pictool.tui.widgets.tokens import TokensView


class TextScreen(PicScreen):
    """A screen with texts, all of the same pieces, that are searched together."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "search", key_display="/"),
        Binding("n", "match(1)", "next match", show=False),
        Binding("N", "match(-1)", "match before", show=False),
        Binding("right_square_bracket", "part(1)", "next part", show=False, key_display="]"),
        Binding("left_square_bracket", "part(-1)", "part before", show=False, key_display="["),
    ]
    _found: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def views(self) -> list[TokensView]:
        return list(self.query(TokensView))

    @property
    def search(self) -> SearchInput:
        return self.query_one(SearchInput)

    def on_resize(self, event: events.Resize) -> None:
        """Sliders take what room there is."""
        for picker in self.query(Picker):
            picker.refresh(layout=True)

    def action_search(self) -> None:
        self.search.open()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Every change marks what it finds; the cursor stays."""
        if event.input is not self.search:
            return
        is_match = self.views[0].shown.find(event.value)
        starts = is_match & ~np.concatenate([[False], is_match[:-1]])
        self._found = starts.nonzero()[0]
        for view in self.views:
            view.set_matches(is_match)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input is self.search:
            self.views[0].focus()
            if self.views[0].cursor not in self._found:
                self.action_match(1)

    def action_match(self, by: int) -> None:
        """The next place that was found, from the first again behind the last."""
        if not len(self._found):
            self.pic.tell("nothing found" if self.search.value else "search with /")
            return
        at = self.views[0].cursor
        index = np.searchsorted(self._found, at, side="right") if by > 0 else np.searchsorted(self._found, at) - 1
        self.go_to(int(self._found[int(index) % len(self._found)]))

    def action_part(self, by: int) -> None:
        """The beginning of the next part that has tokens, or of one before the cursor."""
        view = self.views[0]
        starts = sorted({one for one in view.shown.starts if one < len(view.shown.pieces)})
        behind = (
            [one for one in starts if one > view.cursor] if by > 0 else [one for one in starts if one < view.cursor]
        )
        if behind:
            self.go_to(behind[0] if by > 0 else behind[-1])

    def go_to(self, token: int) -> None:
        """Put the cursor of every view there."""
        for view in self.views:
            view.cursor = token
