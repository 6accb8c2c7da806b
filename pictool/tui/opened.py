"""A trace that is open: read and checked once, and never read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pictool.analysis.trace_view import TraceView, view_of
from pictool.linker.trace import Trace, read_trace


@dataclass(frozen=True)
class Opened:
    """A trace, what it says, and where it was read from."""

    path: Path
    trace: Trace
    view: TraceView

    @property
    def name(self) -> str:
        return str(self.path)

    @classmethod
    def read(cls, path: Path) -> Opened:
        """Raises TraceError: no trace, or a damaged one."""
        trace = read_trace(path)
        return cls(path, trace, view_of(trace))
