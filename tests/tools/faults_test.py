"""A sample of `make faults`: no fault of it does harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.shim import compiler

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    compiler() is None and "CI" not in os.environ, reason="no C compiler (cc, gcc) that builds the preloaded library"
)


@needs_compiler
def test_a_sample_of_faults_and_kills_does_no_harm(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-P", "-m", "faults", "--most", "3", "--shards", "1", "--report", str(report)]
    done = subprocess.run(
        [*command, "--operation", "prefix-longer", "push"], capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tools")))}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in report.read_text().splitlines()]
    assert {result["group"] for result in results} == {"fault", "stuck", "kill", "signal", "pair"}
    assert sum(bool(result["hit"]) for result in results) > len(results) / 2
    assert {0, 1, -9} <= {result["code"] for result in results}
