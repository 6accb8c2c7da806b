"""A question over another screen, before something is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from pictool.escapes import visible


class ConfirmDialog(ModalScreen[bool]):
    """A question with two answers. Enter answers no, since something may be lost."""

    DEFAULT_CSS = """
    ConfirmDialog { align: center middle; }
    ConfirmDialog > Vertical { width: 90%; max-width: 90; height: auto; max-height: 90%; }
    ConfirmDialog > Vertical { border: round $error; padding: 0 1; background: $surface; }
    ConfirmDialog Horizontal { height: auto; margin-top: 1; }
    ConfirmDialog Button { margin-right: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q", "dismiss(False)", "no"),
        Binding("left,right", "app.focus_next", "other button", show=False),
    ]

    def __init__(self, question: str, yes: str, details: Sequence[str]) -> None:
        super().__init__()
        self._lines, self._yes = [question, *details], yes

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text("\n".join(map(visible, self._lines))))
            with Horizontal():
                yield Button(f"{self._yes} (y)", variant="error", id="yes", compact=True)
                yield Button("no (n)", id="no", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")
