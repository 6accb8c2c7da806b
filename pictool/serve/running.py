"""Running an application with uvicorn."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from fastapi import FastAPI

_GRACE_S = 5  # for answers that are being sent, once a signal came
_SWITCH_S = 5e-4  # how long one thread keeps Python to itself: what the engine sends must not wait for its next step


class Server(uvicorn.Server):
    """A server that an interrupt or SIGTERM ends in good order: its caller goes on, and cleans up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def run(application: FastAPI, listener: socket) -> None:
    """Serve on a socket until an interrupt or SIGTERM comes."""
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # libraries and the model: 400,000 objects, which every full collection would walk, and all wait for it
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
    )  # fmt: skip
    Server(config).run(sockets=[listener])
