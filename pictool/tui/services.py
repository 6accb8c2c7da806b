"""What the screens ask of the layer above them: everything that needs a model runs there, never in the TUI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pictool.store.format import ObjectFile
    from pictool.store.store import StoredObject
    from pictool.trace.analysis import Look
    from pictool.trace.counts import TraceView
    from pictool.trace.format import Trace
    from pictool.trace.sinks import SinkProfile


@dataclass(frozen=True)
class LinkForm:
    """What the link form says: a request, and where its trace is written."""

    documents: tuple[str, ...]
    query: str
    algo: str
    fields: tuple[str, ...]  # FIELD=VALUE
    trace: str
    max_new_tokens: int = 64
    model: str | None = None


@dataclass(frozen=True)
class PolicyChoice:
    """A policy that can be chosen: its name, and its fields with their defaults."""

    name: str
    fields: Mapping[str, Any]


class Listener(Protocol):
    """Hears of a run; it is called from the thread that asked."""

    def note(self, text: str) -> None:
        """A step that was begun or done."""

    def text(self, piece: str) -> None:
        """A piece of the answer."""


class Job(Protocol):
    """The model's side. Every call blocks, and raises PicError; `cancel`, from another thread, ends the call that runs.

    A cancelled call raises Cancelled.
    """

    def policies(self) -> Sequence[PolicyChoice]:
        """What can be chosen."""

    def link(self, form: LinkForm, listener: Listener) -> Path:
        """Link, answer, and write the trace; returns its path."""

    def look(self, trace: Trace, name: str, layer: int | None, listener: Listener) -> Look:
        """What the model shows behind a trace: attention (of one layer, or all) and the deviation from full."""

    def sinks(self, key: str, listener: Listener) -> SinkProfile:
        """What the first tokens of an object of the store draw of its attention, when it is read alone."""

    def cancel(self) -> None:
        """End what runs, now."""


class Cancelled(Exception):
    """The user ended the run."""


@dataclass(frozen=True)
class Exports:
    """What the views are as JSON: the same as the commands' `--json`."""

    trace: Callable[[Path, Trace, TraceView, Look | None], Mapping[str, Any]]
    diff: Callable[[tuple[str, str], Trace, Trace], Mapping[str, Any]]
    object: Callable[[ObjectFile, SinkProfile | None], Mapping[str, Any]]
    listing: Callable[[Sequence[StoredObject]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Services:
    """What the command gives the TUI."""

    job: Job
    exports: Exports
