"""Running an application with uvicorn: connections within bounds, and an end in good order."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from socket import socket
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pictool.errors import ModelError
from pictool.serve.work import Backend

_GRACE_S = 5  # for answers that are being sent, once a signal came
_END_S = 10  # in which the rest get an error, as the server ends
_HEAD_S = 10.0  # in which a request's head comes; h11 bounds its bytes (64 KiB)
UNREAD_S, _LEAST_READ = 30.0, 64 << 10  # of what is sent, a client reads at least so many bytes in so long
_MAX_HEADS = 256  # connections whose request has not come; more, and the oldest is closed,
_CROWDED_S = 1.0  # if it has had so long: many clients that connect at once are not reset
_ARENA_MAX, _ARENAS = -8, 2  # malloc's option M_ARENA_MAX, and how many arenas all threads of a server share
_SUMMARY_TICKS = 600  # a minute, between two lines on what was reused
_SWITCH_S = 5e-4  # how long one thread keeps Python to itself: what the engine sends must not wait for its next step


_log = logging.getLogger("pictool.serve")


class Protocol(H11Protocol):
    """HTTP/1.1 on one connection, which is closed if no request comes on it, or its client does not read.

    Args:
        idle: the connections of a server that have no request, the oldest first.
    """

    def __init__(self, *args: Any, idle: dict[Protocol, asyncio.TimerHandle], **more: Any) -> None:
        super().__init__(*args, **more)
        self._idle = idle
        self._unread: asyncio.TimerHandle | None = None  # while the client is behind

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or a malformed chunk; a response that has begun ends with its connection."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def _wait_for_reader(self) -> None:
        """Abort the connection if little more of what is buffered for it is read in time; else wait again."""
        before = self.transport.get_write_buffer_size()

        def check() -> None:
            if before - self.transport.get_write_buffer_size() < _LEAST_READ:
                self.transport.abort()
            else:
                self._wait_for_reader()

        self._unread = self.loop.call_later(UNREAD_S, check)

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()

    def _note(self) -> None:
        """Start or stop the timeout of a request: for its head, or for the rest of one that was answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self not in self._idle and not self.transport.is_closing():
            self._idle[self] = self.loop.call_later(_HEAD_S, self.transport.abort)
            oldest, timer = next(iter(self._idle.items()))
            if len(self._idle) > _MAX_HEADS and timer.when() - self.loop.time() <= _HEAD_S - _CROWDED_S:
                oldest.transport.abort()

    def _forget(self) -> None:
        if timer := self._idle.pop(self, None):
            timer.cancel()


class Server(uvicorn.Server):
    """A server that an interrupt or SIGTERM ends in good order: its caller goes on, and cleans up.

    Attributes:
        has_lost_engine: it ended since its engine did.

    Args:
        summary: what is said each minute, and at the end; None: nothing new.
    """

    def __init__(
        self, application: Any, backend: Backend | None = None, summary: Callable[[], str | None] = lambda: None
    ) -> None:
        self._backend, self._summary, self.has_lost_engine = backend, summary, False
        super().__init__(
            uvicorn.Config(
                application, http=partial(Protocol, idle={}),  # type: ignore[arg-type]
                ws="none", lifespan="off", log_level="warning", access_log=False,
                log_config=None,  # uvicorn's own closes the handlers of all other loggers, and absl's closes stderr
                timeout_graceful_shutdown=1 if backend is None else _GRACE_S + _END_S,
            )
        )  # fmt: skip

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0 and self._backend is not None and not await self._backend.lives():
            self.has_lost_engine = True
            return True
        if counter % _SUMMARY_TICKS == _SUMMARY_TICKS - 1:
            self.summarise()
        return await super().on_tick(counter)

    def summarise(self) -> None:
        """Say how much of the prompts was reused, if there were some since it was last said."""
        if summary := self._summary():
            _log.warning("pic: %s", summary)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_backend())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_backend(self) -> None:
        """Send an error to clients whose answers are still running, before uvicorn cancels them."""
        await asyncio.sleep(_GRACE_S)
        if self._backend is not None:
            await asyncio.to_thread(self._backend.close)


def share_arenas() -> None:
    """Have all threads allocate from few arenas, where malloc is glibc's and the environment says nothing else.

    Each arena keeps what was freed in it, so that a server's memory rises with the threads that ever had one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_ARENA_MAX, _ARENAS)


def run(
    application: FastAPI, listener: socket, backend: Backend, summary: Callable[[], str | None] = lambda: None
) -> None:
    """Serve on a socket until an interrupt or SIGTERM comes.

    Raises:
        ModelError: the engine ended before.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # libraries and the model: 400,000 objects, which every full collection would walk, and all wait for it
    server = Server(application, backend, summary)
    server.run(sockets=[listener])
    server.summarise()
    if server.has_lost_engine:
        raise ModelError("the server's engine stopped; see its log, and start the server again")
