"""`vllm serve` with PicConnector as a process of this one: what a router fronts where it names no server."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pictool.engines.vllm import plugin
from pictool.engines.vllm.client.setup import parse_settings
from pictool.engines.vllm.request import SECRET
from pictool.errors import InputError

CONNECTOR = "pictool.engines.vllm.connector"
_LOGS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_COLOR": "0"}  # stderr shows escapes, and obeys none
_POLL_S, _END_S = 0.2, 20.0
_OURS = ("--model", "--served-model-name", "--dtype", "--kv-transfer-config", "--host", "--port")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class EngineOptions:
    """What vLLM's engine is started with.

    Fields:
        model: directory of the model. name: what the API calls it.
        extra: fields of `kv_connector_extra_config`.
        more: options of `vllm serve`, as on its command line; they come after ours, so that they win.
    """

    model: str
    name: str
    dtype: str
    extra: Mapping[str, Any]
    more: Sequence[str] = ()

    @property
    def arguments(self) -> list[str]:
        """The command line of `vllm serve`, without `more`."""
        transfer = {
            "kv_connector": "PicConnector", "kv_connector_module_path": CONNECTOR, "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": dict(self.extra),
        }  # fmt: skip
        return [
            "--model", self.model, "--served-model-name", self.name, "--dtype", self.dtype,
            "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip


@dataclass(frozen=True)
class VllmProcess:
    """A server that was started, and its address."""

    url: str
    process: subprocess.Popen[bytes]

    def lives(self) -> bool:
        return self.process.poll() is None


@contextmanager
def vllm_server(options: EngineOptions, key: str) -> Iterator[VllmProcess]:
    """Start a server on a port of this machine, and wait until it answers. It ends with the context.

    Works where the command `vllm` does not start, as on the CPU build.

    Args:
        key: what its requests carry as their bearer.

    Raises:
        InputError: fields that do not fit, or vLLM does not start.
    """
    parse_settings(options.extra)
    for part in options.more:
        if (name := part.partition("=")[0].replace("_", "-")) in _OURS:
            raise InputError(f"{name}: is set by pic serve; pass it before -- (pic serve --help)")
    os.environ.setdefault(SECRET, secrets.token_hex(32))
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    listening = ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"]
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    surroundings = {"VLLM_API_KEY": key, plugin.ENDS: "1"}
    if "VLLM_PLUGINS" in os.environ:
        surroundings["VLLM_PLUGINS"] = f"{os.environ['VLLM_PLUGINS']},{plugin.NAME}"
    process = subprocess.Popen(
        [*module, *options.arguments, *listening, "--disable-uvicorn-access-log", *options.more],
        env=_LOGS | os.environ | surroundings, stdout=sys.stderr, start_new_session=True, preexec_fn=_end_with_parent,
    )  # fmt: skip
    try:
        _wait_until_ready(process, url)
        yield VllmProcess(url, process)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    while True:
        if process.poll() is not None:
            raise InputError("vLLM does not start; see its log above")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except OSError:
            time.sleep(_POLL_S)


def _end_with_parent() -> None:
    """In the new process: have it end when this one is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)
