from __future__ import annotations

import pytest

from pictool.linker import spec
from pictool.runtime import sensitivity


@pytest.fixture
def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of fixups after two probes, no longer than needed: a hybrid writes its probes token by token."""
    monkeypatch.setattr(spec, "PROBES", 2)
    monkeypatch.setattr(sensitivity, "_LENGTHS_WRITTEN", 1)
