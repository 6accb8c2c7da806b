"""The link screen: a form whose request runs in another process, its streamed answer, and the trace that opens then.

Without a trace it answers question after question in one engine, which keeps exact prefixes.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Input, Label, ProgressBar, Select, Static
from textual.worker import get_current_worker

from pictool.errors import InputError, PicError
from pictool.escapes import visible, visible_lines
from pictool.linker.grid import parse_policy
from pictool.linker.policies import DEFAULT
from pictool.tui.base import PicScreen
from pictool.tui.documents import describe_documents, split_documents
from pictool.tui.services import Cancelled, LinkForm, PolicyChoice
from pictool.tui.widgets.key_footer import KeyFooter

_FIELDS = (
    ("documents", "documents: files (docs/*.txt), .kvo objects or keys, as in a shell"), ("query", "query"),
    ("params", "fields of the policy: FIELD=VALUE …"),
    ("others", "compare with: POLICY [FIELD=VALUE …]; POLICY …"),
    ("trace", "trace to write (the others: -2, -3 …); empty: an answer alone, reusing earlier prompts"),
    ("max", "tokens of the answer"),
    ("model", "model (empty: the default)"),
)  # fmt: skip
_NAMED = 6  # documents that are named below their field


class LinkScreen(PicScreen):
    """Fields, two buttons, progress and the answer."""

    DEFAULT_CSS = """
    LinkScreen VerticalScroll { height: 1fr; padding: 0 1; }
    LinkScreen Label { color: $text-muted; }
    LinkScreen Input, LinkScreen Select { margin-bottom: 0; }
    LinkScreen #buttons { height: 1; margin-top: 1; }
    LinkScreen #progress { height: 1; }
    LinkScreen #names { height: auto; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; }
    LinkScreen #note { height: auto; max-height: 3; }
    LinkScreen #answer { height: auto; min-height: 2; background: $boost; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "link", "link"),
        Binding("ctrl+g", "cancel", "cancel the run"),
    ]
    export_name = "link"

    def __init__(self, documents: Sequence[str] = ()) -> None:
        super().__init__()
        self._documents = shlex.join(documents)
        self._policies: dict[str, PolicyChoice] = {}
        self._algo, self._note_text = "", ""
        self.is_linking, self._answer, self._started = False, "", 0.0

    def compose(self) -> ComposeResult:
        values = {"documents": self._documents, "trace": free_name(), "max": "64"}
        with VerticalScroll():
            for name, label in _FIELDS:
                if name == "params":
                    yield Label("policy")
                    yield Select([(DEFAULT, DEFAULT)], value=DEFAULT, allow_blank=False, id="algo", compact=True)
                yield Label(label, markup=False)
                yield Input(values.get(name, ""), id=name, compact=True)
                if name == "documents":
                    yield Static(id="names")
            with Horizontal(id="buttons"):
                yield Button("Link", variant="primary", id="start", compact=True)
                yield Button("Cancel", id="stop", disabled=True, compact=True)
            yield ProgressBar(id="progress", show_eta=False)
            yield Static(id="note")
            yield Static(id="answer")
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#progress").display = False
        self.query_one("#documents" if not self._documents else "#query").focus()
        self._name_documents()
        self.run_worker(self._read_policies, thread=True, group="policies")
        self.set_interval(0.5, self._tick)

    def _read_policies(self) -> None:
        """Read the policies in a thread: the other process has to start first."""
        policies: Sequence[PolicyChoice] = ()
        problem = ""
        try:
            policies = self.pic.services.job.policies()
        except (PicError, Cancelled) as error:
            problem = str(error)
        self.app.call_from_thread(self._show_policies, policies, problem)

    def _show_policies(self, policies: Sequence[PolicyChoice], problem: str) -> None:
        if not self.is_attached:
            return
        if problem:
            self._note(problem)
            return
        self._policies = {policy.name: policy for policy in policies}
        select = self.query_one("#algo", Select)
        chosen = select.value
        select.set_options([(Text(visible(name)), name) for name in self._policies])
        select.value = chosen if chosen in self._policies else next(iter(self._policies))
        self._show_fields(str(select.value))

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "documents":
            self._name_documents()

    def _name_documents(self) -> None:
        """Say what each document is, in a thread: a glob may go through a large directory."""
        text = self.query_one("#documents", Input).value
        self.run_worker(partial(self._find_documents, text), thread=True, exclusive=True, group="documents")

    def _find_documents(self, text: str) -> None:
        worker, objects = get_current_worker(), self.pic.home.listing.described

        def name_of(prefix: str) -> str | None:
            key = next((key for key in objects if key.startswith(prefix)), None)
            return None if key is None else self.pic.object_name(key, objects[key])

        try:
            lines = describe_documents(split_documents(text), name_of, _NAMED)
        except ValueError as error:
            lines = [str(error)]
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show_documents, lines)

    def _show_documents(self, lines: Sequence[str]) -> None:
        if self.is_attached:
            self.query_one("#names", Static).update(Text("\n".join(map(visible, lines))))

    def on_select_changed(self, event: Select.Changed) -> None:
        self._show_fields(str(event.value))

    def _show_fields(self, algo: str) -> None:
        """Show the fields of a policy with their defaults, if it is another than before."""
        if algo in self._policies and algo != self._algo:
            self._algo, fields = algo, self._policies[algo].fields
            words = [f"{name}={_format_value(value)}" for name, value in fields.items() if value not in (None, "", ())]
            self.query_one("#params", Input).value = shlex.join(words)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "start":
            self.action_link()
        else:
            self.action_cancel()

    def forms(self) -> list[LinkForm]:
        """Return a request for each policy, the chosen one first.

        Raises:
            ValueError: no query, an open quote, a glob without files, no number, or no such policy.
        """
        value = {name: self.query_one(f"#{name}", Input).value.strip() for name, _ in _FIELDS}
        algo = str(self.query_one("#algo", Select).value)
        if not value["query"]:
            raise ValueError("a query is needed")
        if value["others"] and not value["trace"]:
            raise ValueError("to compare policies, name a trace to write")
        if not value["max"].isdecimal() or int(value["max"]) < 1:
            raise ValueError("tokens of the answer: must be a number from 1")
        documents, fields = tuple(split_documents(value["documents"])), tuple(shlex.split(value["params"]))
        first = LinkForm(
            documents, value["query"], algo, fields, value["trace"], int(value["max"]), value["model"] or None
        )
        return [first, *self._other_forms(first, value["others"])]

    def _other_forms(self, first: LinkForm, text: str) -> list[LinkForm]:
        forms = []
        for number, words in enumerate(filter(None, map(shlex.split, text.split(";"))), start=2):
            try:
                parse_policy(words[0])
            except InputError as error:
                raise ValueError(str(error)) from error
            path = Path(first.trace)
            trace = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
            forms.append(replace(first, algo=words[0], fields=tuple(words[1:]), trace=trace))
        return forms

    def action_link(self) -> None:
        try:
            forms = self.forms()
        except ValueError as error:
            self._note(str(error))
            return
        existing = [form.trace for form in forms if form.trace and os.path.lexists(form.trace)]
        if existing and not self.is_linking:
            verb = "exists" if len(existing) == 1 else "exist"
            question = f"{', '.join(existing)} {verb}. Write over {'it' if len(existing) == 1 else 'them'}?"
            self.ask(question, "write over", partial(self._link, forms))
        else:
            self._link(forms)

    def _link(self, forms: Sequence[LinkForm]) -> None:
        if self.is_linking or not self.pic.acquire_job():
            return
        self._algo, self._note_text = "", ""
        self.is_linking, self._answer, self._started = True, "", time.monotonic()
        self.query_one("#answer", Static).update("")
        self._set_running(True)
        self._note("starting")
        self.query_one("#answer").scroll_visible(animate=False)
        self.run_worker(partial(self._run, forms), thread=True, group="link")

    def action_cancel(self) -> None:
        if self.is_linking:
            self._note("cancelling")
            self.pic.services.job.cancel()

    def action_back(self) -> None:
        if self.is_linking:
            self.pic.tell("the link is running; ctrl+g cancels it")
        else:
            super().action_back()

    def show_message(self, text: str) -> bool:
        self._note(text)
        return True

    def note(self, text: str) -> None:
        """Show a step; called from the thread."""
        self.app.call_from_thread(self._note, text)

    def text(self, piece: str) -> None:
        """Append a piece of the answer; called from the thread."""
        self.app.call_from_thread(self._append, piece)

    def _run(self, forms: Sequence[LinkForm]) -> None:
        paths: list[Path] = []
        problem = ""
        try:
            for form in forms:
                self.app.call_from_thread(self._begin, form.algo, len(paths), len(forms))
                path = self.pic.services.job.link(form, self)
                paths += [] if path is None else [path]
        except Cancelled:
            problem = "cancelled; no trace was written"
        except PicError as error:
            problem = str(error)
        self.app.call_from_thread(self._finish, paths, problem)

    def _begin(self, algo: str, done: int, total: int) -> None:
        """Begin a request. With several policies the bar shows how many are done, and each answer has a line."""
        if total > 1:
            self.query_one("#progress", ProgressBar).update(total=total, progress=done)
            self._append(f"{chr(10) * bool(done)}{algo}: ")

    def _finish(self, paths: Sequence[Path], problem: str) -> None:
        self.is_linking = False
        self.pic.release_job()
        if not self.is_attached:
            return
        self._set_running(False)
        wrote = f"wrote {', '.join(map(str, paths))}"
        if problem.startswith("cancelled") and paths:
            problem = f"cancelled; {wrote}"
        self._note(problem or (wrote if paths else self._note_text))
        if paths:
            self.query_one("#trace", Input).value = free_name()
            if not problem:
                self.pic.open_paths(paths)

    def _set_running(self, is_linking: bool) -> None:
        self.query_one("#progress", ProgressBar).update(total=None)
        self.query_one("#progress").display = is_linking
        self.query_one("#start", Button).disabled = is_linking
        self.query_one("#stop", Button).disabled = not is_linking

    def _append(self, piece: str) -> None:
        self._answer += piece
        self.query_one("#answer", Static).update(Text(visible_lines(self._answer)))

    def _note(self, text: str) -> None:
        self._note_text = visible(text)
        self._tick()

    def _tick(self) -> None:
        seconds = f" ({time.monotonic() - self._started:.0f} s)" if self.is_linking else ""
        self.query_one("#note", Static).update(Text(self._note_text + seconds))

    def export_data(self) -> dict[str, str]:
        values = {field.id or "": field.value for field in self.query(Input)}
        return {**values, "algo": str(self.query_one("#algo", Select).value), "answer": self._answer}


def free_name() -> str:
    """Return link-1.trace, or the next such name that is free."""
    return next(name for i in range(1, 1_000_000) if not Path(name := f"link-{i}.trace").exists())


def _format_value(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
