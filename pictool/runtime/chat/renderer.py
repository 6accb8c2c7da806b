"""Rendering chat templates in a process of their own, which is ended where one takes too long or too much memory.

A template is a program that comes with a model. jinja2's sandbox keeps it from files and from Python's internals, but
bounds neither time nor memory: `'x' * 10**10`, `10**10**9` (computed while it is compiled), nested loops, and many
filters are enough to hang a process. A thread cannot be ended, and to bound every operator and filter is a list that is
never complete. A process is bounded by the system. It starts in 0.15 s when the first chat is rendered, and stays: a
prompt then costs less than a millisecond. If its parent ends, so does it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pictool.runtime.chat.renderer_process import LIMIT_BYTES, LIMIT_S

_PROGRAM = Path(__file__).with_name("renderer_process.py")


class TemplateFailure(Exception):
    """A template that cannot be rendered; says why."""


class TemplateRefusal(Exception):
    """What a template says of messages that it does not take (`raise_exception`)."""


class Renderer:
    """Renders chat templates. One process does it for all threads; a fork starts its own."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin without a process: that of a fork's parent is the parent's."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None, documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        """The text of a chat, up to where its answer begins.

        Args:
            variables: what the template knows beside the messages (the special tokens).
            tools: descriptions of the tools that the model may call.
            documents: for templates that print some.

        Raises:
            TemplateRefusal: the template does not take these messages.
            TemplateFailure: it is not valid, fails, or takes more than `limit_s` or `LIMIT_BYTES`.
        """
        request = {
            "template": template, "messages": list(messages), "variables": dict(variables), "tools": tools,
            "documents": documents,
        }  # fmt: skip
        with self._lock:
            reply = self._ask(json.dumps(request, default=str).encode() + b"\n")
        if "refusal" in reply:
            raise TemplateRefusal(reply["refusal"])
        if "failure" in reply:
            raise TemplateFailure(reply["failure"])
        return reply["text"]

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _ask(self, line: bytes) -> dict[str, str]:
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
            reply: dict[str, str] = json.loads(answer)
            return reply
        code = process.wait()
        self.close()
        if code == -signal.SIGALRM:
            return {"failure": f"it takes longer than {self._limit_s:g} s"}
        return {"failure": f"its process ended ({code}); it may take more than {LIMIT_BYTES >> 20} MiB"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(self._limit_s)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return self._process
