"""A slider on one line, ‹ layer 3 ›, for keys and mouse. Its first position may be None: all together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from pictool.trace.labels import short

_TRACK = 12
_LABEL = 10
_MIN_TERMINAL = 90  # columns of a terminal that has room for tracks


class Picker(Widget, can_focus=True):
    """Picks one of several labels; `value` is its index, or None if there is a label for None."""

    DEFAULT_CSS = """
    Picker { width: auto; height: 1; padding: 0 0 0 1; }
    Picker:focus { background: $primary; color: $text; }
    Picker:focus:nocolor { text-style: reverse; }
    Picker.-empty { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,down", "step(-1)", "less", show=False),
        Binding("right,up", "step(1)", "more", show=False),
    ]
    help_title = "slider"
    value: reactive[int | None] = reactive(None, layout=True)

    class Picked(Message):
        """The user picked another value."""

        def __init__(self, picker: Picker, value: int | None) -> None:
            super().__init__()
            self.picker, self.value = picker, value

        @property
        def control(self) -> Picker:
            return self.picker

    def __init__(self, title: str, *, none: str | None = "mean", id: str | None = None) -> None:
        super().__init__(id=id)
        self._title, self._none = title, none
        self._labels: tuple[str, ...] = ("",)

    def choose_from(self, labels: Sequence[str], value: int | None) -> None:
        """Set the labels and the value; no message is posted."""
        self._labels = tuple(labels)
        self.set_class(len(labels) < 1 or (len(labels) < 2 and self._none is None), "-empty")
        self.set_reactive(Picker.value, value)
        self.refresh(layout=True)

    def render(self) -> Text:
        label = self._none if self.value is None else self._labels[self.value]
        text = Text(f"{self._title} ‹")
        if self._has_track:
            text.append(self._track(), style="dim")
        return text.append(f" {short(label or '', _LABEL)} ", style="bold").append("›")

    @property
    def _has_track(self) -> bool:
        """Whether there is a track: for numbers, where there is room."""
        is_wide = self.app.size.width >= _MIN_TERMINAL
        return is_wide and len(self._labels) > 2 and all(label.isdigit() for label in self._labels)

    def _track(self) -> str:
        """Draw the track; it has no handle at None."""
        if self.value is None:
            return "─" * _TRACK
        handle = round(self.value * (_TRACK - 1) / (len(self._labels) - 1))
        return "─" * handle + "●" + "─" * (_TRACK - 1 - handle)

    def action_step(self, by: int) -> None:
        """Move by a number of values, up to the last one and down to None (or the first)."""
        first = 0 if self._none is None else -1
        index = max(first, min((-1 if self.value is None else self.value) + by, len(self._labels) - 1))
        self.pick(None if index < 0 else index)

    def pick(self, value: int | None) -> None:
        """Set the value as the user does: a message is posted."""
        if value != self.value:
            self.value = value
            self.post_message(self.Picked(self, value))

    def on_click(self, event: events.Click) -> None:
        """Pick the clicked value on the track; elsewhere the left half is less, the right half more."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        start = len(self._title) + 2
        if self._has_track and start <= offset.x < start + _TRACK:
            self.pick(round((offset.x - start) * (len(self._labels) - 1) / (_TRACK - 1)))
        else:
            self.action_step(1 if offset.x >= self.size.width // 2 else -1)
