"""The base of all screens: going back, help, export, a search line, and requests to the model in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.tui.dialogs import ConfirmDialog, HelpScreen, PathDialog
from pictool.tui.services import Cancelled, Listener

if TYPE_CHECKING:
    from pictool.tui.app import PicApp

T = TypeVar("T")


class PicScreen(Screen[None]):
    """A screen of the app with a view that can be exported."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back"),
        Binding("q", "leave", "back, or quit", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("f1", "help", "help"),  # where ? is typed
        Binding("e", "export", "export", show=False),
    ]
    export_name = "view"
    of_every_screen: ClassVar[bool] = True  # its keys, in help

    @property
    def pic(self) -> PicApp:
        return cast("PicApp", self.app)

    def export_data(self) -> Mapping[str, Any] | Sequence[Any]:
        """Return the view's data for JSON."""
        raise NotImplementedError

    def show_message(self, text: str) -> bool:
        """Show a message on this screen itself; returns whether it does."""
        return False

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def action_leave(self) -> None:
        """Go back; from the screen that the command line named, quit."""
        if self is self.pic.opened:
            self.pic.action_help_quit()
        else:
            self.action_back()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self))

    def ask(self, question: str, yes: str, on_yes: Callable[[], None], details: Sequence[str] = ()) -> None:
        """Ask before something is lost; `on_yes` is called once the user agreed."""

        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self.call_after_refresh(on_yes)

        self.app.push_screen(ConfirmDialog(question, yes, details), answered)

    def action_export(self) -> None:
        from pictool.tui.export import free_path

        name = str(free_path(Path(f"{self.export_name}.svg")))
        self.app.push_screen(PathDialog("export to (.svg, .png, .json)", name), self._export)

    def _export(self, name: str | None) -> None:
        """Export after the dialogs are closed and the view is drawn again."""
        if name is None:
            return
        path = Path(name)
        if path.is_file():
            self.ask(f"{path} exists. Write over it?", "write over it", partial(self._hide_toasts, path))
        else:
            self.call_after_refresh(self._hide_toasts, path)

    def _hide_toasts(self, path: Path) -> None:
        """Export once the view is drawn without what the app has told meanwhile."""
        self._show_toasts(False)
        self.call_after_refresh(self._write, path)

    def _show_toasts(self, is_shown: bool) -> None:
        """Give notices room, or none. The app itself shows them again (`display`) whenever it has told something."""
        for rack in self.query("ToastRack"):
            rack.styles.max_height = None if is_shown else 0

    def _write(self, path: Path) -> None:
        from pictool.tui.export import export_view

        try:
            data = self.export_data() if path.suffix == ".json" else {}
            export_view(self.app, path, data)
        except PicError as error:
            self.pic.tell_error(error)
        else:
            self.pic.tell(f"wrote {path}")
        finally:
            self._show_toasts(True)


class SearchInput(Input):
    """An input line at the bottom; escape closes it."""

    DEFAULT_CSS = """
    SearchInput { display: none; height: 1; border: none; padding: 0 1; background: $boost; }
    SearchInput:focus { border: none; height: 1; }
    SearchInput.-open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "leave the search", show=False)]
    help_title = "search line"

    def open(self) -> None:
        self.add_class("-open")
        self.focus()

    def action_leave(self) -> None:
        self.value = ""
        self.remove_class("-open")
        self.screen.focus_next()


class BackgroundRequest(Generic[T]):
    """A request to the model in a thread, at most one of a screen at a time. It is the call's `Listener`.

    Args:
        on_note: shows the progress.
        on_result: shows the result.
        on_failure: shows what was there before, after the request failed or was cancelled.
    """

    def __init__(
        self,
        screen: PicScreen,
        on_note: Callable[[str], None],
        on_result: Callable[[T], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._screen, self.is_running = screen, False
        self._on_note, self._on_result, self._on_failure = on_note, on_result, on_failure

    def start(self, call: Callable[[Listener], T]) -> None:
        """Run `call`, which may raise PicError or Cancelled, in a thread."""
        if not self._screen.pic.acquire_job():
            return
        self.is_running = True
        self._show_note("asking the model")
        self._screen.run_worker(partial(self._run, call), thread=True, group="request")

    def cancel(self) -> bool:
        """Cancel the request; returns whether one was running."""
        if self.is_running:
            self._screen.pic.services.job.cancel()
        return self.is_running

    def note(self, text: str) -> None:
        """Show a step; called from the thread."""
        self._screen.app.call_from_thread(self._show_note, text)

    def text(self, piece: str) -> None:
        """Do nothing: no result is streamed."""

    def _show_note(self, text: str) -> None:
        self._on_note(f"{visible(text)} (escape cancels) …")

    def _run(self, call: Callable[[Listener], T]) -> None:
        """Run in the thread; whatever is shown goes through the app's own thread."""
        result: T | None = None
        problem = ""
        try:
            result = call(self)
        except Cancelled:
            problem = "cancelled"
        except PicError as error:
            problem = str(error)
        self._screen.app.call_from_thread(self._finish, result, problem)

    def _finish(self, result: T | None, problem: str) -> None:
        self.is_running = False
        self._screen.pic.release_job()
        if not self._screen.is_attached:
            return
        if result is not None:
            self._on_result(result)
            return
        self._on_failure()
        self._screen.pic.tell(problem, is_error=problem != "cancelled")
