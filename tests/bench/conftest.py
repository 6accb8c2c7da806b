from __future__ import annotations

import pytest

from pictool.bench import sync
from pictool.bench.roofline import Rates
from pictool.bench.shapes import random_model
from pictool.runtime.model import Model

RATES = Rates(copy_bytes_s=1e9, flops_s=1e9)


@pytest.fixture(scope="session")
def model() -> Model:
    return random_model("tiny", "cpu", "float32")


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    """Rates that take no time to measure."""
    monkeypatch.setattr(sync, "measure_rates", lambda *_: RATES)
    return RATES
