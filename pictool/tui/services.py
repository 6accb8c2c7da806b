"""Services that the screens call: whatever needs a model runs in the layer above the TUI, never in the TUI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

RUN_FILE = "run.json"  # of pictool.spans.runs, which imports more

if TYPE_CHECKING:
    from pictool.store.objects.format import ObjectFile
    from pictool.store.store import Store, StoredObject
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.trace.counts import TraceCounts
    from pictool.trace.format import Trace


def is_run_path(path: Path) -> bool:
    """Whether a path is the file of a query's run, or its folder."""
    return path.name == RUN_FILE or (path / RUN_FILE).is_file()


@dataclass(frozen=True)
class LoadedTrace:
    """A trace that was read and checked once, its counts, and the path of its file."""

    path: Path
    trace: Trace
    counts: TraceCounts

    @property
    def name(self) -> str:
        return str(self.path)

    @classmethod
    def read(cls, path: Path) -> LoadedTrace:
        """Read a trace.

        Raises:
            TraceError: no trace, or a damaged one.
        """
        from pictool.trace.counts import count_rows
        from pictool.trace.format import read_trace

        trace = read_trace(path)
        return cls(path, trace, count_rows(trace))


@dataclass(frozen=True)
class LinkForm:
    """A request as the link form has it, and the path of the trace that is written; empty: none."""

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
    """Receives the progress of a run, in the thread that called the job."""

    def note(self, text: str) -> None:
        """A step began or is done."""

    def text(self, piece: str) -> None:
        """The answer goes on by this piece."""


class Job(Protocol):
    """What needs a model. Every call blocks, and raises PicError; `cancel`, from another thread, ends the running call.

    A cancelled call raises Cancelled.
    """

    def policies(self) -> Sequence[PolicyChoice]:
        """List the policies that can be chosen."""

    def link(self, form: LinkForm, listener: Listener) -> Path | None:
        """Link and answer. Returns the path of the trace, which is of a fresh link; without one prompts are reused."""

    def analyse(self, trace: Trace, name: str, layer: int | None, listener: Listener) -> TraceAnalysis:
        """Analyse a trace: attention (of one layer, or all) and deviation from full recompute."""

    def attention_sinks(self, key: str, listener: Listener) -> AttentionSinks:
        """Measure the attention that the initial tokens of an object draw when it is compiled alone."""

    def pieces(self, key: str, listener: Listener) -> tuple[str, ...]:
        """Decode the tokens of an object; joined, they are its text."""

    def cancel(self) -> None:
        """End the running call now."""


class Cancelled(Exception):
    """The user ended the run."""


@dataclass(frozen=True)
class Exports:
    """Functions that return a view as JSON, the same as the commands' `--json`."""

    trace: Callable[[LoadedTrace, TraceAnalysis | None], Mapping[str, Any]]
    diff: Callable[[LoadedTrace, LoadedTrace], Mapping[str, Any]]
    object: Callable[[ObjectFile, AttentionSinks | None], Mapping[str, Any]]
    listing: Callable[[Store, Sequence[StoredObject]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Services:
    """What `pic tui` passes to the app."""

    job: Job
    exports: Exports
