"""What a thread that works for a request sends to the coroutine that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled

Send = Callable[[object], None]


@dataclass
class Channel:
    """What a thread sends to a coroutine."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def send(self, value: object) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.queue.put_nowait, value)


@dataclass(frozen=True)
class End:
    """Nothing more is sent; `error` is why, if not all was."""

    error: BaseException | None


async def events_of(
    threads: Executor, work: Callable[[Send], None], stop: Callable[[], None]
) -> AsyncGenerator[Any, None]:
    """What work in a thread sends.

    Args:
        stop: ends the work; called, and the work's end awaited, if nobody reads on.

    Raises:
        Exception: what the work raises.
    """
    channel = Channel()

    def run() -> None:
        try:
            work(channel.send)
        except BaseException as error:
            channel.send(End(error))
        else:
            channel.send(End(None))

    running = threads.submit(run)
    try:
        while not isinstance(event := await channel.queue.get(), End):
            yield event
        if event.error is not None:
            raise event.error
    finally:
        if not running.cancel() and not running.done():
            stop()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.wrap_future(running))


def compiled_event(done: Compiled) -> dict[str, Any]:
    """What /v1/link says of an object that was made."""
    return {"compiled": {"source": done.chunk.source, "tokens": len(done.chunk)}}
