"""The machine: what speed depends on, nothing that names it, and None where the system is silent."""

from __future__ import annotations

import getpass
import json
import platform

import psutil
import pytest
import torch
import transformers

import pictool
from pictool.runtime.machine import installed, machine, memory_bytes, usable_cores


def test_it_says_what_speed_depends_on() -> None:
    found = machine()
    assert found["torch"] == torch.__version__ and found["transformers"] == transformers.__version__
    assert found["pictool"] == pictool.__version__ and found["threads"] == torch.get_num_threads()
    assert found["memory_bytes"] == psutil.virtual_memory().total
    assert found["cores"] == len(psutil.Process().cpu_affinity())
    assert found["cpu"] and (found["gpu"] is None) == (not torch.cuda.is_available())


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
