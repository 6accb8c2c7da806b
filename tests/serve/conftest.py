from __future__ import annotations

from collections.abc import Iterator

import pytest

from pictool.runtime.model import Model
from pictool.store.store import Store
from serve.live import Live, serving, tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def live(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without keys, for the tests of one module."""
    with serving(model, Store(tmp_path_factory.mktemp("served") / "store")) as live:
        yield live
