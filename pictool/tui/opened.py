"""A trace that is open: read and checked once, and never read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pictool.trace.counts import TraceView
    from pictool.trace.format import Trace


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
        from pictool.trace.counts import view_of
        from pictool.trace.format import read_trace

        trace = read_trace(path)
        return cls(path, trace, view_of(trace))
