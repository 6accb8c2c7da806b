"""`pic tui`: a store and traces, looked into. It renders frozen results; what needs a model is asked of `Services`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from pictool.errors import PicError
from pictool.store.store import Store
from pictool.trace.labels import visible
from pictool.tui.home_screen import HomeScreen
from pictool.tui.opened import Opened

if TYPE_CHECKING:
    from pictool.trace.sinks import SinkProfile
    from pictool.tui.services import Services


def _is_ours(node: object, binding: Binding) -> bool:
    """Whether a class of this package binds it; the framework's keys are no actions of a screen."""
    ours = [one for one in type(node).__mro__ if one.__module__.startswith("pictool.")]
    return any(binding.action == known.action for one in ours for known in one.__dict__.get("BINDINGS", ()))


class PicApp(App[None]):
    """The app; the home screen is always at the bottom. Every other screen is imported when it is first shown."""

    TITLE = "pic"
    CSS = """
    OptionList:nocolor > .option-list--option-highlighted { text-style: reverse; }
    CommandList:nocolor > .option-list--option-highlighted { text-style: reverse; }
    Input:nocolor > .input--cursor, Input:nocolor > .input--selection { text-style: reverse; }
    Input:nocolor:focus, Select:nocolor:focus > SelectCurrent { text-style: underline; }
    Button:nocolor:focus { text-style: reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "quit", show=False, priority=True)]

    def __init__(self, store: Store, traces: Sequence[Opened], services: Services) -> None:
        # Without colour: what stands in for colours are attributes, and the terminal's own ink and ground.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.store, self.services = store, services
        self.traces = list(traces)
        self.home = HomeScreen(store)
        self.profiles: dict[str, SinkProfile] = {}  # of objects, by key, which says what they hold
        self._is_job_taken = False

    def on_mount(self) -> None:
        self.push_screen(self.home)
        if len(self.traces) == 1:
            self.show_trace(self.traces[0])
        elif self.traces:
            self.show_compare(self.traces)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: textual's own, and every action of the screen that is seen."""
        yield from super().get_system_commands(screen)
        for key, one in screen.active_bindings.items():
            binding = one.binding
            if binding.description and one.node in (screen, screen.focused) and _is_ours(one.node, binding):
                run = partial(self._run_action, binding.action, one.node)
                yield SystemCommand(binding.description, f"key {binding.key_display or key}", run)

    def _run_action(self, action: str, node: object) -> None:
        self.call_later(self.run_action, action, node)

    def open_path(self, name: str | None) -> None:
        """As `open_paths`, from the dialog."""
        if name:
            self.open_paths([Path(name)])

    def open_paths(self, paths: Sequence[Path]) -> None:
        """Read traces in a thread, and show the one, or compare them."""
        self.run_worker(partial(self._read, paths), thread=True, group="open")

    def _read(self, paths: Sequence[Path]) -> None:
        try:
            opened = [Opened.read(path) for path in paths]
        except PicError as error:
            self.call_from_thread(self.tell_error, error)
        else:
            self.call_from_thread(self._opened, opened)

    def _opened(self, opened: Sequence[Opened]) -> None:
        paths = {one.path for one in opened}
        self.traces = [one for one in self.traces if one.path not in paths] + list(opened)
        if self.home.is_attached:
            self.home.show_traces()
            self.home.show_rows()
        if len(opened) == 1:
            self.show_trace(opened[0])
        else:
            self.show_compare(opened)

    def show_trace(self, opened: Opened) -> None:
        from pictool.tui.trace_screen import TraceScreen

        self.push_screen(TraceScreen(opened))

    def show_compare(self, traces: Sequence[Opened]) -> None:
        if len(traces) < 2:
            self.tell("open two traces of one prompt to compare them (o)")
            return
        from pictool.tui.compare_screen import CompareScreen

        try:
            screen = CompareScreen(traces)
        except PicError as error:
            self.tell_error(error)
        else:
            self.push_screen(screen)

    def show_link(self, documents: Sequence[str]) -> None:
        from pictool.tui.link_screen import LinkScreen

        self.push_screen(LinkScreen(documents))

    def take_job(self) -> bool:
        """Whether the model is free; it is taken then, until `free_job`."""
        if self._is_job_taken:
            self.tell("the model is at work; cancel that first, or wait")
            return False
        self._is_job_taken = True
        return True

    def free_job(self) -> None:
        self._is_job_taken = False

    def tell(self, text: str, is_error: bool = False) -> None:
        self.notify(visible(text), severity="error" if is_error else "information", markup=False, timeout=8)

    def tell_error(self, error: PicError) -> None:
        self.tell(str(error), is_error=True)

    async def action_quit(self) -> None:
        """End what runs first: the app waits for its threads."""
        self.services.job.cancel()
        self.exit()
