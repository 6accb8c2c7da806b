"""A `vllm serve` of this process's own, by a module in vLLM's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from pictool.engines.vllm.client import process
from pictool.engines.vllm.request import SECRET
from pictool.errors import InputError

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        said = {name: os.environ.get(name) for name in ("VLLM_API_KEY", "PIC_ROUTER_SECRET")}
        self.wfile.write(json.dumps(said | {"arguments": sys.argv[1:], "pid": os.getpid()}).encode())

if "--fails" in sys.argv:
    sys.exit(3)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
PARENT = """
import sys, time
from pictool.engines.vllm.client import process

with process.vllm_server(process.EngineOptions("model", "name", "float32", {"store": "x"}), "key") as own:
    print(own.process.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(SERVER)
    paths = [str(tmp_path), str(Path(process.__file__).parents[4]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(SECRET, "shared")


def options(*more: str, **extra: Any) -> process.EngineOptions:
    return process.EngineOptions("model", "name", "float32", {"store": "x", **extra}, more)


def test_a_server_has_a_key_the_secret_and_the_connector_and_ends_with_its_context() -> None:
    with process.vllm_server(options("--enforce-eager"), "key") as own:
        said = json.loads(urllib.request.urlopen(own.url, timeout=60).read())
        assert own.lives()
    assert not own.lives() and (said["VLLM_API_KEY"], said[SECRET]) == ("key", "shared")
    arguments = said["arguments"]
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "PicConnector" and arguments[-1] == "--enforce-eager"
    assert "shared" not in " ".join(arguments) and "key" not in arguments


def test_a_server_that_does_not_start_is_an_error() -> None:
    with pytest.raises(InputError), process.vllm_server(options("--fails"), "key"):
        raise AssertionError
    with pytest.raises(InputError, match="--port"), process.vllm_server(options("--port", "1"), "key"):
        raise AssertionError
    with pytest.raises(InputError), process.vllm_server(options(nosuch=1), "key"):
        raise AssertionError


def test_a_server_that_ended_lives_no_more() -> None:
    with process.vllm_server(options(), "key") as own:
        own.process.kill()
        own.process.wait()
        assert not own.lives()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no process of its parent's end")
def test_a_server_ends_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, left = psutil.wait_procs([child], 20)
        for each in left:
            each.kill()
    assert gone
