"""The link screen: a form whose request runs in another process, its streamed answer, and the trace that opens then.

Without a trace it answers question after question in one engine, which keeps exact prefixes.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Label, Static

from pictool.errors import InputError, PicError
from pictool.escapes import visible, visible_lines
from pictool.linker.grid import parse_policy
from pictool.linker.policies import DEFAULT
from pictool.tui.base import PicScreen
from pictool.tui.services import Cancelled, LinkForm

_FIELDS = {
    "documents": "Documents: files (docs/*.txt) or keys of objects, separated by blanks",
    "query": "Question",
    "policies": "Policy; name several to compare them, as legolink-16 cacheblend-15",
    "trace": "Trace file, shown after the answer (optional; further runs get -2, -3, …)",
    "max": "Longest answer, in tokens",
    "model": "Model (empty: the default)",
}


class LinkScreen(PicScreen):
    """Fields, and the answer."""

    DEFAULT_CSS = """
    LinkScreen VerticalScroll { height: 1fr; padding: 0 1; }
    LinkScreen Input { background: $panel; }
    LinkScreen Label { color: $text-muted; }
    LinkScreen #note { height: auto; max-height: 3; margin-top: 1; }
    LinkScreen #answer { height: auto; min-height: 2; background: $panel; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "link", "link"),
        Binding("ctrl+g", "cancel", "cancel the run"),
    ]

    def __init__(self, documents: Sequence[str]) -> None:
        super().__init__()
        self._values = {"documents": shlex.join(documents), "policies": DEFAULT, "trace": free_name(), "max": "64"}
        self.answer = ""

    def compose(self) -> ComposeResult:
        yield self.title_line("Link documents and ask a question")
        with VerticalScroll():
            for name, label in _FIELDS.items():
                yield Label(label, markup=False)
                yield Input(self._values.get(name, ""), id=name, compact=True)
            yield Static(id="note")
            yield Static(id="answer")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#query" if self._values["documents"] else "#documents").focus()

    def forms(self) -> list[LinkForm]:
        """Return a request for each policy.

        Raises:
            ValueError: no query, an open quote, a glob without files, no number, or no such policy.
        """
        value = {name: self.query_one(f"#{name}", Input).value.strip() for name in _FIELDS}
        documents, policies = split_documents(value["documents"]), value["policies"].split() or [DEFAULT]
        if not value["query"]:
            raise ValueError("a query is needed")
        if len(policies) > 1 and not value["trace"]:
            raise ValueError("to compare policies, name a trace to write")
        if not value["max"].isdecimal() or int(value["max"]) < 1:
            raise ValueError("tokens of the answer: must be a number from 1")
        path, forms = Path(value["trace"]), []
        for number, algo in enumerate(policies, 1):
            parse_policy(algo)
            trace = value["trace"] if number == 1 else str(path.with_stem(f"{path.stem}-{number}"))
            forms.append(
                LinkForm(tuple(documents), value["query"], algo, trace, int(value["max"]), value["model"] or None)
            )
        return forms

    def action_link(self) -> None:
        try:
            forms = self.forms()
        except (ValueError, InputError) as error:
            self._note(str(error))
            return
        existing = ", ".join(form.trace for form in forms if form.trace and os.path.lexists(form.trace))
        if existing:
            self.ask(f"Write over {existing}?", "write over", partial(self._link, forms))
        else:
            self._link(forms)

    def action_cancel(self) -> None:
        self.pic.job.cancel()

    @work(thread=True)
    def _link(self, forms: Sequence[LinkForm]) -> None:
        """Link by one policy after the other; each answer has a line."""
        if not self.app.call_from_thread(self.pic.acquire_job):
            return
        paths: list[Path] = []
        self.answer, problem = "", ""
        try:
            for form in forms:
                self._listen("text", "\n" * bool(paths) + f"{form.algo}: " * (len(forms) > 1))
                path = self.pic.job.link(form, self._listen)
                paths += [] if path is None else [path]
        except Cancelled:
            problem = "cancelled"
        except PicError as error:
            problem = str(error)
        finally:
            self.pic.is_job_running = False
        self.show_later(self._finish, paths, problem)

    def _finish(self, paths: Sequence[Path], problem: str) -> None:
        wrote = f"wrote {', '.join(map(str, paths))}" if paths else ""
        if problem or wrote:
            self._note("; ".join(filter(None, [problem, wrote])))
        if paths:
            self.query_one("#trace", Input).value = free_name()
            if not problem:
                self.pic.open_paths(*paths)

    def _listen(self, kind: str, text: str) -> None:
        """Show a step, or append to the answer; called from the thread."""
        self.show_later(self._note if kind == "note" else self._append, text)

    def _append(self, piece: str) -> None:
        self.answer += piece
        self.query_one("#answer", Static).update(Text(visible_lines(self.answer)))

    def _note(self, text: str) -> None:
        self.query_one("#note", Static).update(Text(visible(text)))


def split_documents(text: str) -> list[str]:
    """Return the documents that a line names, globs expanded in the order of their names.

    A word that is a file's name is that file, whatever it looks like.

    Raises:
        ValueError: an open quote, or a glob that no file matches.
    """
    documents: list[str] = []
    for word in map(os.path.expanduser, shlex.split(text)):
        if "\0" in word or os.path.lexists(word) or not glob.has_magic(word):
            documents.append(word)
        elif found := sorted(name for name in glob.iglob(word, recursive=True) if Path(name).is_file()):  # noqa: PTH207
            documents += found
        else:
            raise ValueError(f"{word}: no file matches")
    return documents


def free_name() -> str:
    """Return link-1.trace, or the next such name that is free."""
    return next(name for i in range(1, 1_000_000) if not Path(name := f"link-{i}.trace").exists())
