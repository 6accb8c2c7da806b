"""Dialogs over another screen: the path of a file, and help."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.keys import format_key
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Label, Static

_NOTES = """\
Positions read 5+11: token 11 of chunk 5 (chunks from 1, tokens from 0); head+0, tail+2, answer+0.
A cell of a map shows the largest of its tokens; a token is plain under a tenth of the largest number
(of "computed": at no layer). Attention and deviation are asked of the model, in a process of its own:
the link is done again, and nothing is shown if its logits are not those of the trace.
Click: a token, a cell, a row, a title to sort by, a slider. ctrl+p: every action by name."""


class PathDialog(ModalScreen[str | None]):
    """A dialog for one line; it is dismissed with the line, or with None."""

    DEFAULT_CSS = """
    PathDialog { align: center middle; }
    PathDialog > Vertical { width: 90%; max-width: 76; height: auto; }
    PathDialog > Vertical { border: round $primary; padding: 0 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss_none", "cancel")]

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__()
        self._question, self._value = question, value

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._question, markup=False)
            yield Input(self._value, id="path")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class HelpScreen(ModalScreen[None]):
    """The keys of the screen below, and notes on what is shown."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll { width: 94%; max-width: 100; height: 90%; }
    HelpScreen > VerticalScroll { border: round $primary; padding: 0 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "close")]

    def __init__(self, below: Screen[Any]) -> None:
        super().__init__()
        self._below = below

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text("keys", style="bold"))
            yield Static(keys_of(self._below), id="keys")
            yield Static(Text("\nwhat is shown", style="bold"))
            yield Static(Text(_NOTES))


def keys_of(screen: Screen[Any]) -> Table:
    """Return a table of the keys of a screen, of its widgets and of the app."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    seen = set()
    for node in (screen, *screen.query("*").results(), screen.app):
        for binding in type(node).__dict__.get("BINDINGS", ()):
            if isinstance(binding, Binding) and binding.description and (binding.key, binding.description) not in seen:
                seen.add((binding.key, binding.description))
                keys = ", ".join(map(format_key, binding.key.split(",")))
                table.add_row(Text(keys, style="bold"), Text(binding.description))
    return table
