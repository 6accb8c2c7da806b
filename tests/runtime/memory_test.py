"""Peak memory: what is allocated and freed within counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pictool.runtime import memory
from pictool.runtime.memory import PeakMemory

SIZE = 64 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a process")
def test_the_peak_counts_what_was_freed_again() -> None:
    with PeakMemory("cpu") as peak:
        np.ones(SIZE, dtype=np.uint8)
    with PeakMemory("cpu") as small:
        np.ones(1000, dtype=np.uint8)
    assert peak.bytes is not None and 0.9 * SIZE < peak.bytes < 2 * SIZE
    assert small.bytes is not None and small.bytes < SIZE / 4


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    with PeakMemory("cpu") as peak:
        pass
    assert peak.bytes is None
