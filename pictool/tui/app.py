"""The app of `pic tui`: browse a store and traces. It renders frozen results; its `Job` runs what needs a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.segment import Segment
from textual import work
from textual.app import SystemCommand
from textual.binding import Binding
from textual.color import Color
from textual.filter import LineFilter
from textual.screen import Screen

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.store.store import Store
from pictool.tui.base import PicBase
from pictool.tui.home_screen import HomeScreen
from pictool.tui.services import Job, LoadedTrace, is_run_path

if TYPE_CHECKING:
    from pictool.spans.runs import QueryRun

_OF_TEXTUAL = {binding.action for binding in Screen.BINDINGS if isinstance(binding, Binding)}  # of every screen


class ControlFilter(LineFilter):
    """Draws nothing for characters that steer or hide. Screens show them as escapes; here no forgotten one passes."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if visible(segment.text) == segment.text
            else Segment("".join(char if visible(char) == char else " " * cell_len(char) for char in segment.text),
                         segment.style)
            for segment in segments
        ]  # fmt: skip


class PicApp(PicBase):
    """The app. The home screen is always at the bottom; every other screen is imported when it is first shown."""

    TITLE = "pic"
    CSS = """
    OptionList:nocolor > .option-list--option-highlighted { text-style: reverse; }
    CommandList:nocolor > .option-list--option-highlighted { text-style: reverse; }
    DataTable:nocolor:focus > .datatable--cursor { text-style: reverse; }
    Input:nocolor > .input--cursor, Input:nocolor > .input--selection { text-style: reverse; }
    Input:nocolor:focus, Select:nocolor:focus > SelectCurrent { text-style: underline; }
    Button:nocolor:focus { text-style: reverse; }
    """

    def __init__(self, store: Store, traces: Sequence[LoadedTrace], job: Job, run: QueryRun | None = None) -> None:
        """Make the app; the run of a query is shown first."""
        # Without colour: attributes take the place of colours, and text and background are the terminal's own.
        super().__init__(job, list(traces), ansi_color=True if "NO_COLOR" in os.environ else None)
        self._first_run = run
        self.home = HomeScreen(store)

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), ControlFilter()]

    def on_mount(self) -> None:
        self.push_screen(self.home)
        if self._first_run is not None:
            self.show_run(self._first_run)
        elif self.traces:
            self.show_traces(self.traces)
        self.opened = self.screen

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Fill the palette: textual's own commands, and every action of the active screen."""
        yield from super().get_system_commands(screen)
        for key, (node, binding, _, _) in screen.active_bindings.items():
            if node is screen and binding.action not in _OF_TEXTUAL:
                run = partial(self.run_action, binding.action, screen)
                yield SystemCommand(binding.description, f"key {binding.key_display or key}", run)

    @work(thread=True)
    def open_paths(self, *paths: Path) -> None:
        """Read traces in a thread, then show the trace, or compare several; or the run of a query."""
        from pictool.spans.runs import read_run

        try:
            if is_run_path(paths[0]):
                self.call_from_thread(self.show_run, read_run(paths[0]))
            else:
                self.call_from_thread(
                    self._add_traces, [LoadedTrace.read(path, self.home.store.root) for path in paths]
                )
        except PicError as error:
            self.call_from_thread(self.show_note, str(error))

    def _add_traces(self, traces: Sequence[LoadedTrace]) -> None:
        paths = {trace.path for trace in traces}
        self.traces = [trace for trace in self.traces if trace.path not in paths] + list(traces)
        self.home.show_traces()
        self.home.show_objects()
        self.show_traces(traces)

    def show_run(self, run: QueryRun) -> None:
        from pictool.tui.query_screen import QueryScreen

        self.push_screen(QueryScreen(run))

    def show_traces(self, traces: Sequence[LoadedTrace]) -> None:
        """Show a trace, or compare several."""
        from pictool.tui.compare_screen import CompareScreen
        from pictool.tui.trace_screen import TraceScreen

        self.try_to_show(lambda: TraceScreen(*traces) if len(traces) == 1 else CompareScreen(traces))

    async def action_quit(self) -> None:
        """Cancel the running job first, since the app waits for its threads."""
        self.job.cancel()
        self.exit()
