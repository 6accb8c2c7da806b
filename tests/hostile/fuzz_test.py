"""A sample of what `make fuzz` runs at full size; and the judge itself, which must see what it is for."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hostile.fuzz import Result, Worker
from hostile.judge import Case, Judge, Outcome, Step
from hostile.surfaces import SURFACES

_ = gzip, socket, json, Callable, Iterator, contextmanager, Any, Result, Case, Judge, Outcome, Step, Path
CASES = {"objects": 90, "archives": 40, "traces": 40, "models": 15, "remotes": 15, "databases": 20, "scripts": 30}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(tmp_path_factory.mktemp("hostile"), None)


@pytest.mark.parametrize("surface", SURFACES)
def test_hostile_input_is_refused_or_answered_right(surface: str, worker: Worker) -> None:
    for number in range(CASES[surface]):
        result = worker.run(surface, 0, number)
        assert not result.problems, f"{result.what}: {result.problems}"
