from __future__ import annotations

import pytest

from pictool.bench.shapes import random_model
from pictool.runtime.model import Model


@pytest.fixture(scope="session")
def model() -> Model:
    return random_model("tiny", "cpu", "float32")
