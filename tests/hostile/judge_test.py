"""The judge sees all that it is for: each wrong deed of a command is found, and is called by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostile.judge import Outcome, Step, find_unclear

ROOT = Path(__file__).parents[2]
DEEDS = {
    "traceback ZeroDivisionError": "1 / 0",
    "hang": "time.sleep(9)",
    "memory": "bytearray(11 << 27)[::4096]",
    "disk": "open('case/big', 'wb').truncate(1 << 31)",
    "outside": "open('outside/x', 'w').close()",
    "harm": "open('case/kept', 'w').close()",
    "litter": "open('case/st/tmp/x', 'w').close()",
    "exit code": "sys.exit(3)",
    "not healed": "sys.exit(1)",
    "wrong answer": "print('other')",
    "": "print('right')",
}
PROGRAM = """
import contextlib, json, os, sys, time
from pathlib import Path
from hostile import judge

judge.MAX_SECONDS, judge.THREADS_S = 0.3, 0.1
root = Path.cwd().resolve()
watch = judge.Judge(root)
found = {}
for kind, deed in json.loads(sys.argv[1]).items():
    def run(deed=deed):
        with contextlib.suppress(OSError):
            exec(deed)
    judge.main = run
    (root / "case/st/tmp").mkdir(parents=True, exist_ok=True)
    (root / "outside").mkdir(exist_ok=True)
    (root / "case/kept").write_bytes(b"kept")
    check = lambda outcome: None if outcome.out == "right\\n" or kind not in ("wrong answer", "") else "other"
    step = judge.Step(("do",), (), check, must_answer=kind == "not healed")
    case = judge.Case("", (step,), {root / "case/kept": b"kept"}, ("st",))
    _, problems = watch.run(case)
    found[kind] = sorted({problem.kind for problem in problems})
    (root / "case/st/tmp/x").unlink(missing_ok=True)
print(json.dumps(found))
"""


def test_each_wrong_deed_is_found(tmp_path: Path) -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(DEEDS)], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {kind: set(kinds) for kind, kinds in json.loads(done.stdout).items()}
    assert found.pop("memory") >= {"memory"}  # and a hang, on a busy machine
    assert found == {kind: {kind} - {""} for kind in DEEDS if kind != "memory"}


GOOD = "pic: a note\npic: error: a.kvo: is damaged; compile it again\n"


@pytest.mark.parametrize(
    ("code", "err", "kind"),
    [
        (1, GOOD, None),
        (0, "pic: a note\n", None),
        (1, "", "unclear error"),
        (1, GOOD + GOOD, "unclear error"),
        (1, GOOD + "more\n", "unclear error"),
        (1, "pic: error: something is wrong\n", "unclear error"),
        (1, f"pic: error: a.kvo: {'x' * 5000}\n", "unclear error"),
        (1, "pic: error: a.kvo: \x1b[2J\n", "control characters"),
        (0, "pic: \u202e\n", "control characters"),
        (1, "Traceback (most recent call last):\n", "traceback in output"),
        (-9, GOOD, "exit code"),
    ],
)
def test_an_error_is_one_clear_line(code: int, err: str, kind: str | None) -> None:
    found = find_unclear(Outcome(code, "", err), Step(("inspect", "a.kvo"), ("a.kvo",)))
    assert [problem.kind for problem in found] == ([] if kind is None else [kind])
