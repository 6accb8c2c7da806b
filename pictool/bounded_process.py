"""Code that others wrote, or that reads what others wrote, in a process of its own with bounds on time and memory.

A thread cannot be ended, and to bound every operation of a parser is a list that is never complete. A
process is bounded by the system. It starts at the first request and stays; if its parent ends, so does it. A request is
a line of JSON on its stdin, a reply one on its stdout.

`BoundedProcess` is the parent's half, `serve_requests` the child's.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

TOO_MUCH_MEMORY = "it needs too much memory"


class ProcessFailure(Exception):
    """No reply: the request took too long or too much memory, or ended the process. Says which."""


class BoundedProcess:
    """A process that answers requests, one at a time, for all threads; a fork starts its own.

    Args:
        module: whose `__main__` calls `serve_requests`, with the limits as arguments.
        limit_s: seconds for a request. limit_bytes: of address space.
    """

    def __init__(self, module: str, limit_s: float, limit_bytes: int) -> None:
        self._limit_s, self._limit_bytes = limit_s, limit_bytes
        self._command = [sys.executable, "-P", "-m", module, str(limit_s), str(limit_bytes)]
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin without a process: that of a fork's parent is the parent's."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request. Raises ProcessFailure; the next request starts another process."""
        with self._lock:
            return self._ask(json.dumps(request, default=str).encode() + b"\n")

    def close(self) -> None:
        """End the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _ask(self, line: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # an interrupt: a late reply must not be taken for that of the next request
            self.close()
            raise
        if answer.endswith(b"\n"):
            reply: dict[str, Any] = json.loads(answer)
            return reply
        code = process.wait()
        self.close()
        if code == -signal.SIGALRM:
            raise ProcessFailure(f"its process took longer than {self._limit_s:g} s")
        raise ProcessFailure(f"its process exited ({code}); it may need more than {self._limit_bytes >> 20} MiB")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            path = os.pathsep.join(directory for directory in sys.path if directory)  # this very package
            self._process = subprocess.Popen(
                self._command, env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return self._process


def serve_requests(handle: Callable[[dict[str, Any]], Mapping[str, Any]], limit_s: float, limit_bytes: int) -> None:
    """Answer the requests on stdin until there are no more, each within the limits; in the child.

    A request that takes too much memory is answered `{"failure": …}`.
    """
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it computes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            reply = json.dumps(handle(json.loads(line)))
        except MemoryError:
            reply = json.dumps({"failure": TOO_MUCH_MEMORY})
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)
