"""The job of `pic tui`: run models in another process, so that the screens never wait and cancelling ends the run.

Requests and replies are pickles over pipes, between two processes of this program alone.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from pictool.commands.settings.settings import Settings
from pictool.errors import PicError
from pictool.tui.services import Cancelled, LinkForm, Listener

if TYPE_CHECKING:
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.trace.format import Trace


class WorkerJob:
    """A `Job` in another process, which starts at the first request and keeps its models and engines.

    Args:
        settings: those of this process; the other one reads none.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._is_cancelled = False

    def __enter__(self) -> WorkerJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        if self._process is not None:
            self._process.wait()

    def link(self, form: LinkForm, listener: Listener) -> Path | None:
        return cast("Path | None", self._request("link", (form,), listener))

    def analyse(self, trace: Trace, name: str, listener: Listener) -> TraceAnalysis:
        return cast("TraceAnalysis", self._request("analyse", (trace, name), listener))

    def attention_sinks(self, key: str, listener: Listener) -> AttentionSinks:
        return cast("AttentionSinks", self._request("attention_sinks", (key,), listener))

    def cancel(self) -> None:
        """Kill the process; objects and traces are written whole or not at all."""
        self._is_cancelled = True
        if self._process is not None:
            self._process.kill()

    def _request(self, name: str, arguments: tuple[Any, ...], listener: Listener) -> Any:
        with self._lock:
            self._is_cancelled = False
            process = self._running_process()
            assert process.stdin is not None and process.stdout is not None
            try:
                pickle.dump((name, arguments), process.stdin)
                process.stdin.flush()
                return self._read_reply(process.stdout, listener)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                code = process.wait()
                if self._is_cancelled:
                    raise Cancelled from error
                raise PicError(f"the model's process ended (code {code}): {self._last_error()}") from error

    def _read_reply(self, replies: IO[bytes], listener: Listener) -> Any:
        while True:
            kind, value = pickle.load(replies)
            if kind == "done":
                return value
            if kind == "failed":
                raise value
            listener(kind, value)

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process may write)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pictool.commands.tui_process.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None
            pickle.dump(self._settings, self._process.stdin)
        return self._process

    def _last_error(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
