"""A choice on one line, as a slider: ‹ layer 3 ›, by keys and by mouse. The first position is none: all together."""

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
_WIDE = 90  # of the terminal, for tracks


class Picker(Widget, can_focus=True):
    """One of some labels; `value` is an index, or None where `has_none`."""

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
    value: reactive[int | None] = reactive(None, layout=True)

    class Picked(Message):
        """Another value was picked by the user."""

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
        """Set what there is, and what is picked; nothing is posted."""
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
        """Of numbers, where there is room for it."""
        is_wide = self.app.size.width >= _WIDE
        return is_wide and len(self._labels) > 2 and all(one.isdigit() for one in self._labels)

    def _track(self) -> str:
        """A slider; its left end is none, and blank then."""
        if self.value is None:
            return "─" * _TRACK
        at = round(self.value * (_TRACK - 1) / (len(self._labels) - 1))
        return "─" * at + "●" + "─" * (_TRACK - 1 - at)

    def action_step(self, by: int) -> None:
        """The next value; it ends at the last one, and at none."""
        least = 0 if self._none is None else -1
        at = max(least, min((-1 if self.value is None else self.value) + by, len(self._labels) - 1))
        self.pick(None if at < 0 else at)

    def pick(self, value: int | None) -> None:
        """As the user picks: it is posted."""
        if value != self.value:
            self.value = value
            self.post_message(self.Picked(self, value))

    def on_click(self, event: events.Click) -> None:
        """On the track: there. Else the left half is less, the right half more."""
        at = event.get_content_offset(self)
        if at is None:
            return
        begin = len(self._title) + 2
        if self._has_track and begin <= at.x < begin + _TRACK:
            self.pick(round((at.x - begin) * (len(self._labels) - 1) / (_TRACK - 1)))
        else:
            self.action_step(1 if at.x >= self.size.width // 2 else -1)
