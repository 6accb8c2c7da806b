"""Checkpoints inside a computation: where one thread serves several requests, the others run there (docs/design.md §5).

What computes calls `checkpoint` before each of its parts, as a layer of some rows, or a batch of llama.cpp's; and after
what it has done: a token, an object, an answer. Whoever lets requests take turns sets what that does in the context of
each (a greenlet has a context of its own); elsewhere it does nothing. So what is set on a module, or on the thread,
while a part is computed must not outlive the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Pause = Literal["part", "step", "turn"]
Checkpoint = Callable[[Pause], None]

_own: ContextVar[Checkpoint | None] = ContextVar("checkpoint", default=None)


def set_checkpoint(run: Checkpoint) -> None:
    """Call `run` at the checkpoints of this context."""
    _own.set(run)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Let no other request run meanwhile."""
    token = _own.set(None)
    try:
        yield
    finally:
        _own.reset(token)


def checkpoint(pause: Pause = "part") -> None:
    """Let other requests run. Ends this one, by what it raises, if nobody waits for it any more.

    Args:
        pause: before a part of what is computed, where others run if this one has long computed; after a step, where
            they do; or where its turn may end, as after an object, and between two answers.
    """
    run = _own.get()
    if run is not None:
        run(pause)
