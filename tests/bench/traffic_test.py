"""Streams of requests: what is drawn, and what it depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import subjects
from bench.workloads import USERS, workload_of

from pictool.bench.traffic import Traffic
from pictool.bench.users import User
from pictool.errors import InputError
from pictool.runtime.model import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return subjects.subject("llama").model


@pytest.fixture(scope="module")
def four(model: Model) -> list[User]:
    return USERS.make(model, 4, seed=0)


def test_streams_depend_on_seed_rate_and_users_only(model: Model, four: list[User]) -> None:
    alone = workload_of(model, four, (3,), rates=(1.0,)).streams[0]
    among = workload_of(model, four, (1, 3), rates=(4.0, 1.0)).streams[1]
    same = [stream for stream in among if stream.rate == 1.0]
    assert [stream.requests for stream in same] == [stream.requests for stream in alone]
    assert all(np.array_equal(a.arrivals, b.arrivals) for a, b in zip(same, alone, strict=True))
    assert alone[0].requests != alone[1].requests  # another repeat
    assert alone[0].requests != workload_of(model, four, (3,), rates=(1.0,), seed=1).streams[0][0].requests


def test_users_and_questions_are_equally_likely(model: Model, four: list[User]) -> None:
    two, three = (replace(user, questions=user.questions * n) for user, n in zip(four, (2, 3), strict=False))
    (stream,) = workload_of(model, [two, three], requests=6000, repeats=1).streams[0]
    counts = {who: [0, 0, 0] for who in (0, 1)}
    for request in stream.requests:
        counts[request.user][request.question] += 1
    assert counts[0] == pytest.approx([1500, 1500, 0], rel=0.1)
    assert counts[1] == pytest.approx([1000, 1000, 1000], rel=0.1)


def test_a_run_without_requests_is_refused(model: Model, four: list[User]) -> None:
    with pytest.raises(InputError, match=r"--rate 0.001: nothing arrives in 1 s; use --duration or --requests"):
        workload_of(model, four, rates=(0.001,), requests=None, duration=1)


@pytest.mark.parametrize(
    "wrong",
    [{"repeats": 0}, {"measured": -1}, {"seed": -1}, {"rates": ()}, {"rates": (1.0, 0.0)}, {"duration": 0.0},
     {"gamma_share": 0.0}, {"gamma_share": 1.5}, {"gamma_share": float("nan")}],
)  # fmt: skip
def test_traffic_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Traffic(**wrong)
