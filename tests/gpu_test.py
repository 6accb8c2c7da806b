"""`make gpu` before any GPU: parts end in time, each leaves how it ended, and missing packages come from wheels."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part, run_parts

QUICK, BAD, SLOW = (
    Part("quick", ("-c", "print('here')"), 30), Part("bad", ("-c", "import sys; print('why'); sys.exit(3)"), 30),
    Part("slow", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 0.5),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def test_each_part_leaves_how_it_ended_and_the_next_ones_run(tmp_path: Path) -> None:
    outcomes = run_parts([BAD, SLOW, QUICK], tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["failed with exit code 3", "ended after 0 s", "passed"]
    assert [outcome.tail for outcome in outcomes] == ["why", "begun", "here"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [entry["part"] for entry in summary] == ["bad", "slow", "quick"]
    assert "=== slow\nbegun" in (tmp_path / "out" / "log.txt").read_text()


def test_no_part_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TOTAL_S", 0)
    (outcome,) = run_parts([QUICK], tmp_path / "out")
    assert outcome.state == "left out: no time is left"


def test_the_exit_code_is_that_of_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "parts", lambda: [QUICK, BAD])
    assert gpu.main(["--part", "quick", "--out", str(tmp_path / "a")]) == 0
    assert gpu.main(["--out", str(tmp_path / "b")]) == 1


def test_packages_that_are_missing_come_from_wheels(tmp_path: Path) -> None:
    gpu.WHEELS.mkdir()
    for name in ("pic_made_up", "pytest"):
        with zipfile.ZipFile(gpu.WHEELS / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "VALUE = 7")
    probe = Part(
        "probe", ("-c", "import pic_made_up as made, pytest; print(made.VALUE, hasattr(pytest, 'fixture'))"), 30
    )
    (outcome,) = run_parts([probe], tmp_path / "out")
    assert outcome.tail == "7 True"


def test_it_runs_before_anything_is_installed() -> None:
    source = Path(gpu.__file__).read_text()
    imported = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names | {"__future__"}


def test_what_is_given_is_not_downloaded() -> None:
    needed = gpu._needed(gpu.NEEDED)
    assert {"blake3", "zstandard", "typer", "pytest", "aiohttp", "markdown-it-py"} <= needed
    assert not needed & {"torch", "transformers", "numpy", "tokenizers", "huggingface-hub", "fastapi"}


def test_every_part_fits_into_the_time() -> None:
    names = [part.name for part in gpu.parts()]
    assert len(names) == len(set(names)) and all(part.limit_s <= gpu.TOTAL_S < 540 for part in gpu.parts())
