from __future__ import annotations

from pathlib import Path

import pytest

from pictool.store.store import Store


@pytest.fixture
def far(tmp_path: Path) -> Store:
    """The store that `server` serves, empty at first."""
    return Store(tmp_path / "far")
