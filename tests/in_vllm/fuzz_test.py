"""A sample of what `make fuzz-vllm` runs at full size: requests to a server whose store has faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from vllm_server import environment

REQUESTS = 400


def test_whatever_clients_and_the_disk_do_the_engine_lives_and_answers_are_right(tmp_path: Path) -> None:
    command = ("-P", "-m", "vllm_fuzz", "--requests", str(REQUESTS), "--seed", "0", "--keep", str(tmp_path / "kept"))
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment(), timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"], report["problems"]) == (REQUESTS, 0, [])
    assert min(report["verdicts"][kind] for kind in ("linked", "exact", "compiled", "refused", "unsaid")) > 5
    assert report["ordinary"]["requests"] > 20 and sum(report["faults"].values()) > 5
