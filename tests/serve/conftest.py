from __future__ import annotations

from collections.abc import Iterator

import pytest

from pictool.runtime.model import Model
from pictool.store.store import Store
from serve.live import KEYS, RESPONSES, TEMPLATE, Live, Script, serving, tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def live(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without keys, for the tests of one module."""
    with serving(model, Store(tmp_path_factory.mktemp("served") / "store")) as live:
        yield live


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a model that writes reasoning and calls, for the tenant a."""
    store, model = Store(tmp_path_factory.mktemp("said") / "store"), tiny_model(TEMPLATE, responses=RESPONSES)
    with serving(model, store, KEYS, key="key-of-a") as live:
        yield live


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """What the model says."""
    return Script().install(monkeypatch)
