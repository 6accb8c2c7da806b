"""What the general plugin does in a process of vLLM's, without vLLM."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import psutil
import pytest

from pictool.engines.vllm.plugin import hide_credentials

OPTIONS = {"kv_connector_extra_config": {"remote": "s3://user:secret@bucket/pic?token=secret", "store": "st"}}


def test_vllm_logs_no_password_of_a_remote() -> None:
    root, shown = logging.getLogger("vllm"), io.StringIO()
    handler = logging.StreamHandler(shown)
    root.addHandler(handler)
    try:
        hide_credentials()
        hide_credentials()  # in the server, and again as the plugin
        logging.getLogger("vllm.entrypoints").warning("non-default args: %s", OPTIONS)
    finally:
        root.removeHandler(handler)
    assert "s3://bucket/pic?…" in shown.getvalue() and "secret" not in shown.getvalue()
    assert len(handler.filters) == 1


_PARENT = """
import multiprocessing, os, time
from pictool.engines.vllm import plugin

def child():
    plugin.register()
    print(os.getpid(), flush=True)
    time.sleep(60)

ASK
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""


@pytest.mark.parametrize("asks", [True, False])
def test_an_engine_ends_with_a_process_that_is_killed_and_asked_for_it(asks: bool) -> None:
    script = _PARENT.replace("ASK", "os.environ[plugin.ENDS] = '1'" if asks else "")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, left = psutil.wait_procs([child], 20 if asks else 0.5)
        for process in left:
            process.kill()
    assert bool(gone) == asks
