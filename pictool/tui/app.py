"""The app of `pic tui`: browse a store and traces. It renders frozen results; `Services` runs what needs a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.filter import LineFilter
from textual.screen import Screen
from textual.theme import Theme

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.store.store import Store, StoredObject
from pictool.tui.base import PicScreen
from pictool.tui.home_screen import HomeScreen
from pictool.tui.preferences import Preferences
from pictool.tui.services import LoadedTrace, Services, is_run_path

if TYPE_CHECKING:
    from pictool.spans.runs import QueryRun
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.tui.watching import Address

_NAME_LENGTH = 60  # characters of a text that name an object
LIGHT_THEME = "textual-light"


def _is_ours(node: object, binding: Binding) -> bool:
    """Whether a class of this package binds a key; the framework's own keys are not actions of a screen."""
    ours = [cls for cls in type(node).__mro__ if cls.__module__.startswith("pictool.")]
    return any(binding.action == own.action for cls in ours for own in cls.__dict__.get("BINDINGS", ()))


class ControlFilter(LineFilter):
    """Draws nothing for characters that steer or hide. Screens show them as escapes; here no forgotten one passes."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if visible(segment.text) == segment.text else _without_controls(segment) for segment in segments
        ]


def _without_controls(segment: Segment) -> Segment:
    """The segment with spaces, as many as cells, in place of what `visible` would escape."""
    text = "".join(char if visible(char) == char else " " * cell_len(char) for char in segment.text)
    return Segment(text, segment.style)


class PicApp(App[None]):
    """The app. The home screen is always at the bottom; every other screen is imported when it is first shown."""

    TITLE = "pic"
    CSS = """
    OptionList:nocolor > .option-list--option-highlighted { text-style: reverse; }
    CommandList:nocolor > .option-list--option-highlighted { text-style: reverse; }
    Input:nocolor > .input--cursor, Input:nocolor > .input--selection { text-style: reverse; }
    Input:nocolor:focus, Select:nocolor:focus > SelectCurrent { text-style: underline; }
    Button:nocolor:focus { text-style: reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "quit", show=False, priority=True)]

    def __init__(
        self, store: Store, traces: Sequence[LoadedTrace], services: Services, run: QueryRun | None = None,
        preferences: Preferences | None = None, is_light: bool = False, server: Address | None = None,
    ) -> None:  # fmt: skip
        """Make the app.

        Args:
            run: that of a query, which is shown first. server: one that is watched, likewise.
            preferences: the theme that the user chose; where another one is kept.
            is_light: whether the terminal's background is light; the theme is, too, if none was chosen.
        """
        # Without colour: attributes take the place of colours, and text and background are the terminal's own.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self._control_filter = ControlFilter()
        self.store, self.services = store, services
        self.traces, self._first_run, self._server = list(traces), run, server
        self.home = HomeScreen(store)
        self.attention_sinks: dict[str, AttentionSinks] = {}  # of objects, by key
        self.opened: Screen[Any] | None = None  # the screen that the command line named, or the home screen
        self._is_job_running = False
        self._preferences = Preferences() if preferences is None else preferences
        self._first_theme = self._choose_theme(is_light)

    def _choose_theme(self, is_light: bool) -> str:
        """Set the theme: the environment's (TEXTUAL_THEME), else the chosen one, else one as light as the terminal."""
        chosen = self._preferences.theme
        if chosen is not None and chosen not in self.available_themes:
            where = self._preferences.path
            self._preferences.problem = f"{where}: there is no theme {chosen!r}; choose one with ctrl+p"
        if "TEXTUAL_THEME" not in os.environ:
            if chosen in self.available_themes:
                self.theme = chosen
            elif is_light:
                self.theme = LIGHT_THEME
        return self.theme

    def _remember_theme(self, theme: Theme) -> None:
        """Keep the theme that the user chose."""
        if theme.name != self._first_theme:
            self._first_theme = ""
            try:
                self._preferences.remember_theme(theme.name)
            except PicError as error:
                self.tell_error(error)

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._control_filter]

    def on_mount(self) -> None:
        self.theme_changed_signal.subscribe(self, self._remember_theme)
        self.push_screen(self.home)
        if self._preferences.problem:
            self.tell(self._preferences.problem, is_error=True)
        if self._server is not None:
            self.show_server(self._server)
        elif self._first_run is not None:
            self.show_run(self._first_run)
        elif len(self.traces) == 1:
            self.show_trace(self.traces[0])
        elif self.traces:
            self.show_compare(self.traces)
        self.opened = self.screen

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Fill the palette: textual's own commands, and every action of the active screen."""
        yield from super().get_system_commands(screen)
        for key, active in screen.active_bindings.items():
            binding, node = active.binding, active.node
            if binding.description and node in (screen, screen.focused) and _is_ours(node, binding):
                run = partial(self._run_action, binding.action, node)
                yield SystemCommand(binding.description, f"key {binding.key_display or key}", run)

    def _run_action(self, action: str, node: object) -> None:
        self.call_later(self.run_action, action, node)

    def trace_files(self) -> list[str]:
        """The traces and runs of queries in the working directory, the newest first."""
        paths = [path for path in Path().iterdir() if path.suffix == ".trace" or is_run_path(path)]
        return [str(path) for path in sorted(paths, key=lambda path: -path.stat().st_mtime_ns)]

    def open_path(self, name: str | None) -> None:
        """Open the trace, or the query's run, that was named in the dialog."""
        if name and is_run_path(Path(name)):
            self.run_worker(partial(self._read_run, Path(name)), thread=True, group="open")
        elif name:
            self.open_paths([Path(name)])

    def _read_run(self, path: Path) -> None:
        from pictool.spans.runs import read_run

        try:
            run = read_run(path)
        except PicError as error:
            self.call_from_thread(self.tell_error, error)
        else:
            self.call_from_thread(self.show_run, run)

    def show_run(self, run: QueryRun) -> None:
        from pictool.tui.query_screen import QueryScreen

        self.push_screen(QueryScreen(run))

    def show_server(self, address: Address) -> None:
        from pictool.tui.server_screen import ServerScreen

        self.push_screen(ServerScreen(address))

    def open_paths(self, paths: Sequence[Path]) -> None:
        """Read traces in a thread; then show the trace, or compare several."""
        self.run_worker(partial(self._read, paths), thread=True, group="open")

    def _read(self, paths: Sequence[Path]) -> None:
        try:
            traces = [LoadedTrace.read(path) for path in paths]
        except PicError as error:
            self.call_from_thread(self.tell_error, error)
        else:
            self.call_from_thread(self._add_traces, traces)

    def _add_traces(self, traces: Sequence[LoadedTrace]) -> None:
        paths = {trace.path for trace in traces}
        self.traces = [trace for trace in self.traces if trace.path not in paths] + list(traces)
        if self.home.is_attached:
            self.home.show_traces()
            self.home.show_objects()
        if len(traces) == 1:
            self.show_trace(traces[0])
        else:
            self.show_compare(traces)

    def show_trace(self, loaded: LoadedTrace) -> None:
        from pictool.tui.trace_screen import TraceScreen

        self.push_screen(TraceScreen(loaded))

    def show_compare(self, traces: Sequence[LoadedTrace]) -> None:
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

    def show_object_diff(self, store: Store, first: str, second: str) -> None:
        from pictool.tui.object_diff_screen import ObjectDiffScreen

        try:
            screen = ObjectDiffScreen(store, first, second)
        except PicError as error:
            self.tell_error(error)
        else:
            self.push_screen(screen)

    def source_of(self, key: str) -> str | None:
        """The document that an object came from, as far as the store or an open trace tells."""
        known = self.home.listing.sources.get(key)
        if known is not None:
            return known.source
        chunks = (chunk for loaded in self.traces for chunk in loaded.trace.chunks)
        return next((chunk.source for chunk in chunks if chunk.key == key), None)

    def object_name(self, key: str, stored: StoredObject | None) -> str:
        """An object's name for people: the document that it came from, else the beginning of its text."""
        source = self.source_of(key)
        if source is not None:
            return source
        if stored is not None and stored.meta is None:
            return "DAMAGED"
        words = " ".join(stored.text.split()) if stored is not None else ""
        return f"«{words[:_NAME_LENGTH]}{'…' * (len(words) > _NAME_LENGTH)}»" if words else key[:12]

    def name_of(self, key: str) -> str:
        """The name of an object of the listing."""
        return self.object_name(key, self.home.listing.described.get(key))

    def show_link(self, documents: Sequence[str]) -> None:
        from pictool.tui.link_screen import LinkScreen

        self.push_screen(LinkScreen(documents))

    def acquire_job(self) -> bool:
        """Acquire the model until `release_job`; returns whether it was free."""
        if self._is_job_running:
            self.tell("the model is at work; cancel that first, or wait")
            return False
        self._is_job_running = True
        return True

    def release_job(self) -> None:
        self._is_job_running = False

    def tell(self, text: str, is_error: bool = False) -> None:
        """Show a message: in the screen's own line, if it has one that a notice would cover."""
        if isinstance(self.screen, PicScreen) and self.screen.show_message(text):
            return
        self.notify(visible(text), severity="error" if is_error else "information", markup=False, timeout=8)

    def tell_error(self, error: PicError) -> None:
        self.tell(str(error), is_error=True)

    def action_help_quit(self) -> None:
        """Quit at Ctrl-C, as programs on a terminal do."""
        self.run_worker(self.action_quit())

    async def action_quit(self) -> None:
        """Cancel the running job first, since the app waits for its threads."""
        self.services.job.cancel()
        self.exit()
