"""What the screens share: going back, help, export; and on those that show text, search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input

from pictool.errors import PicError
from pictool.tui.dialogs import HelpScreen, PathDialog
from pictool.tui.export import export_view
from pictool.tui.widgets.tokens import TokensView

if TYPE_CHECKING:
    from pictool.tui.app import PicApp


class PicScreen(Screen[None]):
    """A screen of the app, with something to export."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back"),
        Binding("e", "export", "export"),
        Binding("question_mark", "help", "help", key_display="?"),
    ]
    export_name = "view"

    @property
    def pic(self) -> PicApp:
        return cast("PicApp", self.app)

    def export_data(self) -> Mapping[str, Any] | Sequence[Any]:
        """What the view is made of, for JSON."""
        raise NotImplementedError

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self))

    def action_export(self) -> None:
        self.app.push_screen(PathDialog("export to (.svg, .png, .json)", f"{self.export_name}.svg"), self._export)

    def _export(self, name: str | None) -> None:
        """Once the dialog is gone and the view is drawn again."""
        if name is not None:
            self.call_after_refresh(self._write, Path(name))

    def _write(self, path: Path) -> None:
        try:
            data = self.export_data() if path.suffix == ".json" else {}
            export_view(self.app, path, data)
        except PicError as error:
            self.pic.tell_error(error)
        else:
            self.pic.tell(f"wrote {path}")


class SearchInput(Input):
    """One line at the bottom; escape leaves it."""

    DEFAULT_CSS = """
    SearchInput { display: none; height: 1; border: none; padding: 0 1; background: $boost; }
    SearchInput:focus { border: none; height: 1; }
    SearchInput.-open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "leave the search", show=False)]

    def open(self) -> None:
        self.add_class("-open")
        self.focus()

    def action_leave(self) -> None:
        self.value = ""
        self.remove_class("-open")
        self.screen.focus_next()


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
