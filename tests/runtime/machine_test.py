"""The machine: what speed depends on, nothing that names it, None where the system is silent; peak memory."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import tiny
import torch
import transformers

import pictool
from pictool.errors import ModelError
from pictool.runtime.machine import PeakMemory, installed, machine, memory_bytes, torch_version, usable_cores
from pictool.runtime.model import load_model

SIZE = 64 << 20
MEASURE = f"""
import numpy as np
from pictool.runtime.machine import PeakMemory
for size in ({SIZE}, 1000):
    with PeakMemory("cpu") as peak:
        np.ones(size, dtype=np.uint8)
    print(peak.bytes)
"""


def test_it_says_what_speed_depends_on() -> None:
    description = machine()
    assert description["torch"] == torch.__version__ and description["transformers"] == transformers.__version__
    assert description["pictool"] == pictool.__version__ and description["threads"] == torch.get_num_threads()
    assert 0 < description["memory_bytes"] <= psutil.virtual_memory().total
    assert description["cores"] == len(psutil.Process().cpu_affinity())
    assert description["cpu"] and (description["gpu"] is None) == (not torch.cuda.is_available())


def test_torch_s_build_is_told_without_an_import_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As torch tells it; the metadata of a package from PyPI has `2.13.0` for `2.13.0+cu130`."""
    assert torch_version() == torch.__version__
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n\n__version__ = '2.13.0+cu130'\ndebug = False\n"
    )
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_version() == "2.13.0+cu130"
    monkeypatch.setattr("pictool.runtime.machine.find_spec", lambda _: None)
    assert torch_version() is None


@pytest.mark.parametrize(("limit", "has"), [("1000\n", 1000), ("max\n", None), (f"{1 << 60}\n", None)])
def test_a_container_has_the_memory_that_it_may_take(
    limit: str, has: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr("pictool.runtime.machine._CONTAINER_LIMIT", tmp_path / "memory.max")
    assert memory_bytes() == (has or psutil.virtual_memory().total)


def test_a_model_that_memory_does_not_hold_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    monkeypatch.setattr("pictool.runtime.machine.memory_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=f"^{directory}: .*bfloat16.* cpu "):
        _ = load_model(str(directory), "cpu", "bfloat16").module


def test_it_names_neither_machine_nor_user() -> None:
    text = json.dumps(machine())
    assert platform.node() not in text and f'"{getpass.getuser()}"' not in text


def test_what_the_system_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> int:
        raise ValueError

    monkeypatch.setattr("os.sysconf", fails)
    assert memory_bytes() is None and installed("no-such-package") is None
    monkeypatch.delattr("os.sched_getaffinity")
    assert usable_cores() == psutil.cpu_count()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a process")
def test_the_peak_counts_what_was_freed_again() -> None:
    """In a process of its own: what other tests left, and free meanwhile, would be counted."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    peak, small = map(int, done.stdout.split())
    assert 0.9 * SIZE < peak < 2 * SIZE and small < SIZE / 4


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pictool.runtime.machine._CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with PeakMemory("cpu") as peak:
        pass
    assert peak.bytes is None
