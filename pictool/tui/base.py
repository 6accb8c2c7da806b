"""The base of all screens: going back, help, pictures, questions, a search line, and requests to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, HelpPanel, Input, Static
from textual.worker import Worker

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.tui.services import Cancelled, Job, Listener, LoadedTrace

if TYPE_CHECKING:
    from pictool.trace.attention_sinks import AttentionSinks

T = TypeVar("T")


class PicBase(App[None]):
    """What screens know of the app.

    Attributes:
        attention_sinks: of objects, by key. opened: the screen that the command line named, or the home screen.
    """

    def __init__(self, job: Job, traces: list[LoadedTrace], ansi_color: bool | None = None) -> None:
        super().__init__(ansi_color=ansi_color)
        self.job, self.traces, self.is_job_running = job, traces, False
        self.attention_sinks: dict[str, AttentionSinks] = {}
        self.opened: Screen[Any] | None = None

    def open_paths(self, *paths: Path) -> Worker[None]:
        """Read traces in a thread, then show the trace, or compare several; or the run of a query."""
        raise NotImplementedError

    def show_traces(self, traces: Sequence[LoadedTrace]) -> None:
        """Show a trace, or compare several."""
        raise NotImplementedError

    def try_to_show(self, make: Callable[[], Screen[None]]) -> None:
        """Show a screen, unless what it is to show cannot be read."""
        try:
            self.push_screen(make())
        except PicError as error:
            self.show_note(str(error))

    def acquire_job(self) -> bool:
        """Acquire the model, until `is_job_running` is set back; returns whether it was free."""
        if self.is_job_running:
            self.show_note("the model is at work; cancel that first, or wait")
            return False
        self.is_job_running = True
        return True

    def show_note(self, text: str) -> None:
        self.notify(visible(text), markup=False, timeout=8)


class PicScreen(Screen[None]):
    """A screen of the app. Its first line says what it is about."""

    DEFAULT_CSS = """
    PicScreen #title { height: 1; padding: 0 1; background: $boost; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back"),
        Binding("q", "leave", "back, or quit", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("f1", "help", "help", show=False),  # where ? is typed
        Binding("e", "app.screenshot(None, '.')", "export as SVG", show=False),
    ]

    @property
    def pic(self) -> PicBase:
        return cast(PicBase, self.app)

    def title_line(self, text: str) -> Static:
        """The first line."""
        return Static(Text(visible(text), no_wrap=True, overflow="ellipsis"), id="title")

    def action_back(self) -> None:
        if self.query(HelpPanel):
            self.app.action_hide_help_panel()
        elif self.pic.is_job_running:
            self.pic.job.cancel()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    async def action_leave(self) -> None:
        """Go back; from the screen that the command line named, quit."""
        if self is self.pic.opened:
            await self.app.action_quit()
        else:
            self.action_back()

    def action_help(self) -> None:
        if self.query(HelpPanel):
            self.app.action_hide_help_panel()
        else:
            self.app.action_show_help_panel()

    def ask(self, question: str, yes: str, on_yes: Callable[[], object], details: Sequence[str] = ()) -> None:
        """Ask before something is lost; `on_yes` is called once the user agreed."""

        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self.call_after_refresh(on_yes)

        self.app.push_screen(ConfirmDialog(question, yes, details), answered)

    def show_later(self, show: Callable[..., object], *results: object) -> None:
        """Show what a thread found out, in the app's own thread, unless the screen was left meanwhile."""

        def show_if_there() -> None:
            if self.is_attached:
                show(*results)

        self.app.call_from_thread(show_if_there)

    @work(thread=True)
    def ask_model(self, call: Callable[[Listener], T], on_result: Callable[[T], None], shown: Static) -> None:
        """Run a call of the job in a thread; its steps take the place of a line, which is as before if it fails."""
        if not self.app.call_from_thread(self.pic.acquire_job):
            return
        before = shown.content

        def listen(_: str, step: str) -> None:
            self.app.call_from_thread(shown.update, Text(f"{visible(step)} (escape cancels) …"))

        try:
            listen("note", "asking the model")
            result = call(listen)
        except (Cancelled, PicError) as error:
            self.app.call_from_thread(shown.update, before)
            self.app.call_from_thread(self.pic.show_note, str(error) or "cancelled")
        else:
            self.app.call_from_thread(on_result, result)
        finally:
            self.pic.is_job_running = False


class SearchInput(Input):
    """An input line that is there while it is used; escape closes it."""

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
