"""What the screens share: going back, help, export, a line to search in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input

from pictool.errors import PicError

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
        from pictool.tui.dialogs import HelpScreen

        self.app.push_screen(HelpScreen(self))

    def action_export(self) -> None:
        from pictool.tui.dialogs import PathDialog

        self.app.push_screen(PathDialog("export to (.svg, .png, .json)", f"{self.export_name}.svg"), self._export)

    def _export(self, name: str | None) -> None:
        """Once the dialog is gone and the view is drawn again."""
        if name is not None:
            self.call_after_refresh(self._write, Path(name))

    def _write(self, path: Path) -> None:
        from pictool.tui.export import export_view

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
