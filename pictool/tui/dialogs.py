"""Dialogs over another screen: the path of a file, a question before something is lost, and help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.keys import format_key
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Input, Label, OptionList, Static

from pictool.escapes import visible

_TWO_COLUMNS = 76  # width that two columns of keys need
_NOTES = """\
Positions read 5+11: token 11 of chunk 5 (chunks from 1, tokens from 0); head+0, tail+2, answer+0.
A cell of a map shows the largest of its tokens; a token is plain under a tenth of the largest number
(of "computed": at no layer). Attention and deviation are asked of the model, in a process of its own:
the link is done again, and nothing is shown if its logits are not those of the trace.
Click: a token, a cell, a row, a title to sort by, a slider. ctrl+p: every action by name."""


class PathDialog(ModalScreen[str | None]):
    """A dialog for one line, or one of the choices below it; it is dismissed with the line, or with None."""

    DEFAULT_CSS = """
    PathDialog { align: center middle; }
    PathDialog > Vertical { width: 90%; max-width: 76; height: auto; }
    PathDialog > Vertical { border: round $primary; padding: 0 1; background: $surface; }
    PathDialog OptionList { height: auto; max-height: 10; border: none; padding: 0; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss_none", "cancel")]

    def __init__(self, question: str, value: str = "", choices: Sequence[str] = ()) -> None:
        super().__init__()
        self._question, self._value, self._choices = question, value, choices

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._question, markup=False)
            yield Input(self._value, id="path")
            if self._choices:
                yield OptionList(*(Text(visible(choice)) for choice in self._choices), id="choices")

    def on_key(self, event: events.Key) -> None:
        """Move from the line to the choices."""
        if event.key == "down" and self._choices and self.query_one("#path").has_focus:
            self.query_one("#choices").focus()
            event.stop()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._choices[event.option_index])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class ConfirmDialog(ModalScreen[bool]):
    """A question with two answers. Enter answers no, since something may be lost."""

    DEFAULT_CSS = """
    ConfirmDialog { align: center middle; }
    ConfirmDialog > Vertical { width: 90%; max-width: 90; height: auto; max-height: 90%; }
    ConfirmDialog > Vertical { border: round $error; padding: 0 1; background: $surface; }
    ConfirmDialog Label { width: 1fr; }
    ConfirmDialog #details { color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; height: auto; }
    ConfirmDialog Horizontal { height: auto; margin-top: 1; }
    ConfirmDialog Button { margin-right: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
        Binding("left,right", "other_button", "other button", show=False),
    ]

    def __init__(self, question: str, yes: str, details: Sequence[str] = ()) -> None:
        super().__init__()
        self._question, self._yes = visible(question), visible(yes)
        self._details = [visible(detail) for detail in details]

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._question, markup=False)
            if self._details:
                yield Static(Text("\n".join(self._details)), id="details")
            with Horizontal():
                yield Button(Text(f"{self._yes} (y)"), variant="error", id="yes", compact=True)
                yield Button(Text("no (n)"), id="no", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)

    def action_other_button(self) -> None:
        self.focus_next()


class HelpScreen(ModalScreen[None]):
    """The keys of the screen below and of its panes, and notes on what is shown."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll { width: 94%; max-width: 110; height: 90%; }
    HelpScreen > VerticalScroll { border: round $primary; padding: 0 1; background: $surface; }
    HelpScreen #keys { height: auto; layout: horizontal; }
    HelpScreen.-narrow #keys { layout: vertical; }
    HelpScreen #keys > Vertical { width: 1fr; height: auto; }
    HelpScreen .pane { height: auto; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,f1", "dismiss", "close")]

    def __init__(self, below: Screen[Any]) -> None:
        super().__init__()
        self._below = below

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            own, *others = [
                Static(pane_table(title, keys), classes="pane") for title, keys in keys_of(self._below).items()
            ]
            yield Container(Vertical(own), Vertical(*others), id="keys")
            yield Static(Text(_NOTES))

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < _TWO_COLUMNS, "-narrow")


def pane_table(title: str, keys: Mapping[str, str]) -> Table:
    """Return a table of the keys of a pane, with its title above."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = Text(title, style="bold underline"), "left", ""
    table.add_column(no_wrap=True, min_width=8)
    table.add_column()
    for key, description in keys.items():
        table.add_row(Text(key, style="bold"), Text(description))
    return table


def keys_of(screen: Screen[Any]) -> dict[str, dict[str, str]]:
    """Return what the keys do on a screen, in each kind of pane that it has, and on every screen; by pane, by key."""
    bound: set[str] = set()  # by the screen, before its base
    panes: dict[str, dict[str, str]] = {"on this screen": {}}
    everywhere: dict[str, str] = {}
    for cls in type(screen).__mro__:
        of_class = _keys_of_class(cls, bound)
        shown = everywhere if "of_every_screen" in vars(cls) else panes["on this screen"]
        shown.update(of_class if _is_ours(cls) else {})
    for node in screen.query("*").results():
        if title := getattr(node, "help_title", ""):
            panes[f"in a {title}"] = _keys_of_class(type(node), set())
    everywhere |= {"ctrl+p": "every action by name, and the theme"} | _keys_of_class(type(screen.app), bound)
    return {title: keys for title, keys in (panes | {"on every screen": everywhere}).items() if keys}


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("pictool.")


def _keys_of_class(cls: type, bound: set[str]) -> dict[str, str]:
    """Return the keys that a class binds, but for those that are bound already; they are then."""
    keys = {}
    for binding in cls.__dict__.get("BINDINGS", ()):
        names = [] if not isinstance(binding, Binding) else [key for key in binding.key.split(",") if key not in bound]
        if names and binding.description:
            keys[", ".join(map(format_key, names))] = binding.description
        bound.update(names)
    return keys
