"""What the screens share with the layer above the TUI: whatever needs a model runs there, never in the TUI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

RUN_FILE = "run.json"  # of pictool.spans.runs, which imports more
_NAME_LENGTH = 60  # characters of a text that name an object

if TYPE_CHECKING:
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.trace.counts import TraceCounts
    from pictool.trace.format import Trace, TracedChunk

# Receives the progress of a run, in the thread that called the job: ("note", a step that began or is done), or
# ("text", the next piece of the answer).
Listener = Callable[[str, str], None]


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
    def read(cls, path: Path, store: Path | None = None) -> LoadedTrace:
        """Read a trace. What was linked from an object of the store, by its key, is named after its document.

        Raises:
            TraceError: no trace, or a damaged one.
        """
        from pictool.store.sources import read_sources
        from pictool.trace.counts import count_rows
        from pictool.trace.format import read_trace

        trace = read_trace(path)
        known = {} if store is None else read_sources(store)

        def named(chunk: TracedChunk, text: str) -> TracedChunk:
            is_key = bool(chunk.key) and Path(chunk.source).stem == chunk.key
            name = known[chunk.key].source if chunk.key in known else beginning(text)
            return replace(chunk, source=name) if is_key else chunk

        trace = replace(trace, chunks=tuple(map(named, trace.chunks, trace.texts[1:])))
        return cls(path, trace, count_rows(trace))


def beginning(text: str) -> str:
    """The beginning of a text, in quotes: the name of an object whose document is not known."""
    words = " ".join(text.split())
    return f"«{words[:_NAME_LENGTH]}{'…' * (len(words) > _NAME_LENGTH)}»"


@dataclass(frozen=True)
class LinkForm:
    """A request as the link form has it, and the path of the trace that is written; empty: none."""

    documents: tuple[str, ...]
    query: str
    algo: str
    trace: str
    max_new_tokens: int = 64
    model: str | None = None


class Job(Protocol):
    """What needs a model. Every call blocks, and raises PicError; `cancel`, from another thread, ends the running call.

    A cancelled call raises Cancelled.
    """

    def link(self, form: LinkForm, listener: Listener) -> Path | None:
        """Link and answer. Returns the path of the trace, which is of a fresh link; without one prompts are reused."""

    def analyse(self, trace: Trace, name: str, listener: Listener) -> TraceAnalysis:
        """Analyse a trace: attention and deviation from full recompute."""

    def attention_sinks(self, key: str, listener: Listener) -> AttentionSinks:
        """Measure the attention that the initial tokens of an object draw when it is compiled alone."""

    def cancel(self) -> None:
        """End the running call now."""


class Cancelled(Exception):
    """The user ended the run."""
