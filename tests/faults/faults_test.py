"""A sample of `make faults`: the harness runs, and sees what it is to see; and no fault of the sample does harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.judge import State, message_problems
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
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in report.read_text().splitlines()]
    assert {result["group"] for result in results} == {"fault", "stuck", "kill", "signal", "pair"}
    assert sum(bool(result["hit"]) for result in results) > len(results) / 2
    assert {0, 1, -9} <= {result["code"] for result in results}


@pytest.mark.parametrize(
    ("code", "err", "problems"),
    [
        (0, "pic: a note\n", []),
        (1, "pic: a note\npic: error: x: cannot be read (why)\n", []),
        (1, "", ["0 reasons for exit code 1"]),
        (1, "pic: error: a\npic: error: b\n", ["2 reasons for exit code 1"]),
        (0, "pic: error: a\n", ["a reason, and exit code 0"]),
        (1, 'pic: error: a\nTraceback (most recent call last):\n  File "x"\n', ["a traceback"]),
        (0, "Exception ignored in: <x>\n", ["a traceback"]),
        (-11, "", ["exit code -11", ]),
        (2, "pic: error: a\n", ["exit code 2"]),
    ],
)  # fmt: skip
def test_what_a_run_may_not_end_with(code: int, err: str, problems: list[str]) -> None:
    assert message_problems(code, "", err) == problems


def test_what_is_litter(tmp_path: Path) -> None:
    for name in (
        "st/objects/ab/" + "ab" * 32 + ".kvo",
        "st/lock",
        "st/store.sqlite3",
        "out/a.json",
        "cache/pictool/x.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    before = State.of(tmp_path)
    assert before.litter() == ["out", "out/a.json"]
    for name in ("st/tmp/.x.tmp", "out/.a.json.0.tmp", "st/store.sqlite3-wal", ".pic-bench-1/y", "cache/z.tmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert State.of(tmp_path).litter(before) == [
        ".pic-bench-1", ".pic-bench-1/y", "cache/z.tmp", "out/.a.json.0.tmp", "st/store.sqlite3-wal",
        "st/tmp/.x.tmp",
    ]  # fmt: skip
