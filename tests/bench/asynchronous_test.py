"""Many users at once: what is executed, and what the figures and goodput are made of."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import subjects
from bench.workloads import POLICIES, USERS, workload_of, write_dataset

from pictool.api import answer
from pictool.bench import asynchronous
from pictool.bench.asynchronous import NO_GOOD, NO_SCORES, AsyncResult, Figures, LoadPoint, bench_async
from pictool.bench.traffic import Workload
from pictool.bench.users import ExecutedRequest, Question, User, dataset_users
from pictool.eval.cases import SpecOptions
from pictool.eval.datasets import open_dataset
from pictool.linker.grid import parse_grid
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.store.store import Store


@pytest.fixture(scope="module")
def model() -> Model:
    return subjects.subject("llama").model


@pytest.fixture(scope="module")
def four(model: Model) -> list[User]:
    return USERS.make(model, 4, seed=0)


Fake = Callable[[Policy, Question], ExecutedRequest]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], list[tuple[str, str]]]:
    """Requests that cost nothing and take what a function says; returns (policy, question) of each."""

    def install(of: Fake) -> list[tuple[str, str]]:
        seen: list[tuple[str, str]] = []

        def execute(_: Model, __: Store, policy: Policy, question: Question) -> ExecutedRequest:
            seen.append((policy.name, question.id))
            return of(policy, question)

        monkeypatch.setattr(asynchronous, "execute", execute)
        return seen

    return install


# What is executed


def test_every_request_is_executed_if_none_is_to_be_drawn(
    model: Model, four: list[User], store: Store, fake: Any
) -> None:
    seen = fake(lambda *_: ExecutedRequest(0.1, 0.2, 3, None))
    steps: list[None] = []
    workload = workload_of(model, four, (2, 4), rates=(1.0, 2.0), measured=0)
    bench_async(model, store, workload, on_step=lambda: steps.append(None))
    requests = [request.user for streams in workload.streams for stream in streams for request in stream.requests]
    assert len(requests) == 2 * 2 * 2 * 7
    assert len(steps) == workload.num_executions == 2 * len(requests)
    assert [int(question) for _, question in seen[2:]] == [user for user in requests for _ in POLICIES]
    assert {policy for policy, _ in seen} == {"legolink", "naive"} and seen[2][0] != seen[4][0]  # in turn


def test_drawn_requests_take_what_one_of_the_same_user_took(
    model: Model, four: list[User], store: Store, fake: Any
) -> None:
    taken = iter(np.linspace(1, 2, 1000))
    fake(lambda policy, question: ExecutedRequest(0.0, 1000.0 * int(question.id) + next(taken), 3, None))
    workload = workload_of(model, four, (3,), requests=60, repeats=1, measured=6)
    result = bench_async(model, store, workload)
    assert workload.num_executions == 12 and len(result.user_sets[0].executions) == 6
    for labelled in POLICIES:
        executions = result.user_sets[0].executions
        measured = [(each.user, each.by_label[labelled.label].service_s) for each in executions]
        assert [user for user, _ in measured] == [0, 1, 2, 0, 1, 2]
        means = {who: statistics.mean(s for user, s in measured if user == who) for who in range(3)}
        (stream,) = workload.streams[0]
        busy = sum(means[request.user] for request in stream.requests)
        (point,) = [point for point in result.points if point.label == labelled.label]
        run = point.runs[0]
        assert run.utilisation * run.duration_s == pytest.approx(busy, rel=1e-3)


def test_users_that_were_not_measured_draw_from_all(model: Model, four: list[User], store: Store, fake: Any) -> None:
    fake(lambda *_: ExecutedRequest(0.0, 1.0, 3, None))
    result = bench_async(model, store, workload_of(model, four, (4,), requests=50, repeats=1, measured=1))
    assert result.points[0].runs[0].requests == 50 and len(result.user_sets[0].executions) == 1


def test_fewer_requests_than_are_to_be_measured_are_all_executed(model: Model, four: list[User]) -> None:
    assert workload_of(model, four, repeats=2, measured=14).num_executions == 2 * 14
    assert workload_of(model, four, repeats=2, measured=13).num_executions == 2 * 13
    assert not workload_of(model, four, repeats=2, measured=14).is_sampled(0)


def test_requests_really_run(model: Model, four: list[User], store: Store) -> None:
    result = bench_async(model, store, workload_of(model, four, rates=(1.0, 100.0), repeats=1, measured=3))
    assert [(point.label, point.rate) for point in result.points] == [
        (labelled.label, rate) for rate in (1.0, 100.0) for labelled in POLICIES
    ]
    for execution in result.user_sets[0].executions:
        assert all(0 < done.ttft_s < done.service_s and done.tokens == 3 for done in execution.by_label.values())
    slow, fast = (point.runs[0] for point in result.points if point.label == "naive")
    assert fast.waiting_mean_s >= slow.waiting_mean_s and slow.goodput is None
    assert result.user_sets[0].no_goodput == NO_SCORES


# Figures


def test_figures_of_a_run_by_hand(model: Model, four: list[User], store: Store, fake: Any) -> None:
    times = {"legolink": ExecutedRequest(0.5, 2.0, 3, None), "naive": ExecutedRequest(0.25, 0.5, 3, None)}
    fake(lambda policy, *_: times[policy.name])
    workload = workload_of(model, four, requests=3, repeats=1)
    stream = replace(workload.streams[0][0], arrivals=np.array([1.0, 2.0, 8.0]))
    result = bench_async(model, store, replace(workload, streams=((stream,),)))
    # legolink: [1, 3), [3, 5), [8, 10); naive: [1, 1.5), [2, 2.5), [8, 8.5).
    slow, fast = (point.runs[0] for point in result.points)
    want = {
        "requests": 3, "duration_s": 10, "ttft_mean_s": 2.5 / 3, "ttft_p50_s": 0.5, "ttft_p99_s": 0.5 + 0.98,
        "latency_mean_s": 7 / 3, "waiting_mean_s": 1 / 3, "throughput": 0.3, "goodput": None, "utilisation": 0.6,
    }  # fmt: skip
    assert vars(slow) == pytest.approx(want)
    assert [fast.ttft_mean_s, fast.waiting_mean_s, fast.throughput] == pytest.approx([0.25, 0.0, 3 / 8.5])


def test_a_point_is_the_mean_of_its_runs_and_their_standard_deviation() -> None:
    runs = tuple(Figures(1, 1.0, ttft, 0, 0, 0, 0, 1.0, None, 0) for ttft in (1.0, 2.0, 6.0))
    point = LoadPoint("naive", "naive", 1, None, 2.0, runs)
    assert point.mean("ttft_mean_s") == 3.0
    assert point.deviation("ttft_mean_s") == pytest.approx(7**0.5)  # (4 + 1 + 9) / 2
    assert point.mean("goodput") is None and point.deviation("goodput") is None
    assert replace(point, runs=runs[:1]).deviation("ttft_mean_s") is None
    assert json.loads(json.dumps(point.report()))["runs"][2]["ttft_mean_s"] == 6.0


# Goodput


def scored(model: Model, path: Path, counts: Sequence[int] = (2,), **traffic: Any) -> Workload:
    found, left_out = dataset_users(model, open_dataset(str(path), {}), SpecOptions(max_new_tokens=4))
    assert left_out == 0
    return workload_of(model, found, counts, **traffic)


def test_goodput_counts_answers_nearly_as_good_as_those_of_full(
    model: Model, store: Store, tmp_path: Path, fake: Any
) -> None:
    scores = {"full": {"q0": 1.0, "q1": 0.2, "q2": 0.3}, "naive": {"q0": 0.4, "q1": 0.39, "q2": 1.0}}
    scores["legolink"] = dict.fromkeys(scores["full"], 0.0)
    seen = fake(lambda policy, question: ExecutedRequest(0.1, 0.25, 3, scores[policy.name][question.id]))
    workload = scored(model, write_dataset(tmp_path / "d.jsonl", "abc"), requests=200, repeats=1)
    result = bench_async(model, store, workload)
    # gamma = 0.8 · (1 + 0.2 + 0.3) / 3 = 0.4: q0 and q2 are good under naive, none under legolink.
    assert result.user_sets[0].gamma == pytest.approx(0.4) and result.user_sets[0].no_goodput is None
    good = sum(request.user == 0 for request in workload.streams[0][0].requests)
    by_label = {point.label: point.runs[0] for point in result.points}
    assert set(by_label) == {"naive", "legolink-2"}
    assert by_label["naive"].goodput == pytest.approx(good / by_label["naive"].duration_s)
    assert by_label["naive"].goodput == pytest.approx(by_label["naive"].throughput * good / 200)
    assert by_label["legolink-2"].goodput == 0.0
    # Every question once per policy, full among them, after the warm-up.
    assert sorted(seen[3:]) == sorted((policy, question) for policy in scores for question in ("q0", "q1", "q2"))
    assert workload.num_executions == 9


def test_gamma_is_that_of_the_questions_of_the_user_set(model: Model, store: Store, tmp_path: Path, fake: Any) -> None:
    scores = {"q0": 1.0, "q1": 0.0, "q2": 0.5}
    fake(lambda policy, question: ExecutedRequest(0.1, 0.25, 3, scores[question.id]))
    workload = scored(model, write_dataset(tmp_path / "d.jsonl", "abc"), (1, 2), gamma_share=0.5)
    result = bench_async(model, store, workload)
    assert [user_set.gamma for user_set in result.user_sets] == pytest.approx([0.375, 0.25])
    assert [len(user_set.executions) for user_set in result.user_sets] == [2, 3]


def test_no_goodput_where_full_answers_nothing_right(model: Model, store: Store, tmp_path: Path) -> None:
    workload = scored(model, write_dataset(tmp_path / "d.jsonl", ["xyzzy", "plugh", "frotz"]), repeats=1)
    result = bench_async(model, store, workload)
    assert result.user_sets[0].gamma is None and result.user_sets[0].no_goodput == NO_GOOD
    assert all(point.mean("goodput") is None for point in result.points)


def test_scores_are_those_of_the_engine(model: Model, store: Store, tmp_path: Path) -> None:
    def asked(index: int, policy: Policy, texts: Sequence[Any]) -> str:
        return answer(model, store, Spec(f"What is {index}?", texts, policy, max_new_tokens=4)).text

    found, _ = dataset_users(model, open_dataset(str(write_dataset(tmp_path / "d.jsonl", "abc")), {}), SpecOptions())
    naive = parse_grid(["naive"])[0].policy
    golds = [asked(i, naive, found[i % 2].documents) for i in range(3)]
    assert all(golds)
    result: AsyncResult = bench_async(model, store, scored(model, write_dataset(tmp_path / "e.jsonl", golds)))
    assert [execution.by_label["naive"].score for execution in result.user_sets[0].executions] == [1.0] * 3
    report = json.loads(json.dumps(result.user_sets[0].report()))
    assert {row["question"] for row in report["executed"]} == {"q0", "q1", "q2"}
    assert {row["label"] for row in report["executed"]} == {"full", "naive", "legolink-2"}
