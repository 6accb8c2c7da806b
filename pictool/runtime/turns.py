"""Checkpoints inside a computation: where one thread serves several requests, the others run there (docs/design.md §5).

What computes calls `checkpoint` before each of its parts: a layer of some rows, a batch of llama.cpp's. Whoever lets
requests take turns sets what that does in the context of each (a greenlet has a context of its own); elsewhere it does
nothing. So what is set on a module, or on the thread, while a part is computed must not outlive the part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Checkpoint = Callable[[], None]

_own: ContextVar[Checkpoint | None] = ContextVar("checkpoint", default=None)


def set_checkpoint(run: Checkpoint) -> None:
    """Call `run` at the checkpoints of this context."""
    _own.set(run)


def checkpoint() -> None:
    """Let other requests run. Ends this one, by what it raises, if nobody waits for it any more."""
    run = _own.get()
    if run is not None:
        run()
