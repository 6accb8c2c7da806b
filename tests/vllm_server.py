"""An OpenAI server with PicConnector in processes of its own, as `vllm serve` would start it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm_rig as rig

TESTS = Path(__file__).parent


def environment() -> dict[str, str]:
    """Of processes in which vLLM runs its engine in another one."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def server(
    world: rig.World, extra: Mapping[str, Any], *options: str, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start a server; its address. Its log is `server.log` beside the model.

    Args:
        extra: fields of `kv_connector_extra_config`.
        options: of the command line, which may repeat those that are here.
        variables: of its environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "PicConnector", "kv_connector_module_path": rig.MODULE, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(world.store.root), **extra},
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(world.directory),
        "--port", str(port), "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024",
        "--max-logprobs", "-1",
        "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "tiny",
        "--kv-transfer-config", json.dumps(transfer), *options,
    ]  # fmt: skip
    log = log_of(world)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment() | dict(variables or {}), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)  # may be reached: it waits for connections that clients keep
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def log_of(world: rig.World) -> Path:
    return world.directory.parent / "server.log"


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(1200):  # a busy machine takes minutes to start it
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=60):
                return
        except OSError:
            assert process.poll() is None, log.read_text()[-6000:]
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-6000:])
