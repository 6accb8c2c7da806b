"""What a step of the worker does for links at most, on a model of the test's own: copies and rows in pieces."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_rig as rig
from alone import compile

from pictool.core import Chunk
from pictool.engines.vllm.client.setup import parse_settings
from pictool.engines.vllm.messages import JobResult, LinkJob
from pictool.engines.vllm.request import LinkParams, ObjectRef, Problem
from pictool.engines.vllm.scheduler.planning import Planner
from pictool.engines.vllm.worker.forward import ForwardPiece, Work
from pictool.engines.vllm.worker.kv import KVHeads
from pictool.engines.vllm.worker.worker import StepBudget, WorkerSide, _Computing
from pictool.linker.plan import LinkPlan
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model
from pictool.store.store import Store

HEAD, TAIL, LENGTH = (1, 70, 71), (80, 81), 60
TOKENS = tuple(int(token) for token in np.random.default_rng(0).integers(5, 90, LENGTH))


class Ranks:
    """What ranks in threads exchange: a call returns when all have called, what each gave."""

    def __init__(self, count: int) -> None:
        self.count, self._values = count, [None] * count
        self._barrier = threading.Barrier(count, timeout=60)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


@dataclass
class FakeRank:
    ranks: Ranks
    index: int
    heads: KVHeads

    def agree(self, problems: Sequence[Problem | None], is_done: Sequence[bool]) -> list[tuple[Problem | None, bool]]:
        of_ranks = self.ranks.exchange(self.index, list(zip(problems, is_done, strict=True)))
        return [
            (next((problem for problem, _ in job if problem is not None), None), all(done for _, done in job))
            for job in zip(*of_ranks, strict=True)
        ]

    def follow_first(self, number: int, has_failed: bool) -> tuple[int, bool]:
        of_ranks = self.ranks.exchange(self.index, (number, has_failed))
        return of_ranks[0][0], any(failed for _, failed in of_ranks)


@dataclass
class FakeForward:
    """A model whose layers are numbers and whose KV is a list of what was written, and which counts rows."""

    rank: FakeRank
    num_layers: int
    work: Callable[[int], object] = lambda _: None  # with the rows of each piece
    num_rows: int = 0
    max_rows: int = 1000
    device: torch.device = torch.device("cpu")
    written: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)

    @property
    def model(self) -> FakeForward:
        return self

    @property
    def layers(self) -> list[int]:
        return list(range(self.num_layers))

    def slots(self, _: object, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def rotate(self, _: object, key: torch.Tensor, __: object) -> torch.Tensor:
        return key

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self.written.append((layer, torch.stack((key, value)), slots))

    def run(self, *_: object) -> Work[None]:
        for _layer in self.layers:
            left = self.num_rows
            while left:
                rows = yield ForwardPiece("layer", left)
                assert 1 <= rows <= left
                self.pieces.append(rows)
                self.work(rows)
                left -= rows


@pytest.fixture
def plan(model: Model, store: Store) -> Iterator[LinkPlan]:
    (compiled,) = compile(model, store, [Chunk("a document", TOKENS, "test")])
    with closing(Planner(parse_settings({"store": str(store.root)}), store, model)) as planner:
        request = LinkParams(make_policy("naive", {}), (ObjectRef(compiled.key, len(HEAD)),))
        plan = planner.plan(request, rig.ids(*HEAD, *TOKENS, *TAIL))
    assert plan is not None
    yield plan


def job_of(plan: LinkPlan, name: str = "a") -> LinkJob:
    return LinkJob(name, plan, np.zeros(plan.num_context, dtype=bool), 0, (0,))


def start(model: Model, store: Store | Path, budget: StepBudget, ranks: Ranks | None = None, rank: int = 0) -> Any:
    ranks = ranks or Ranks(1)
    heads = KVHeads.of_rank(model.geometry.kv_heads, rank, ranks.count)
    forward: Any = FakeForward(FakeRank(ranks, rank, heads), model.geometry.layers)
    return WorkerSide(forward, store if isinstance(store, Store) else Store(store), model, budget), forward


def finish(
    side: WorkerSide, model: Model, jobs: Sequence[LinkJob], after_step: Callable[[], object]
) -> dict[str, JobResult]:
    """Steps that have other work, until all jobs have an outcome."""
    outcomes: dict[str, JobResult] = {}
    for number in range(100_000):
        outcomes |= side.step(jobs if not number else [], model.target, False)
        after_step()
        if len(outcomes) == len(jobs):
            side.shutdown()
            return outcomes
        time.sleep(1e-4)
    raise AssertionError(outcomes)


def test_a_layer_is_copied_in_pieces_within_the_bytes_of_a_step(model: Model, store: Store, plan: LinkPlan) -> None:
    geometry, most = model.geometry, 2000
    side, forward = start(model, store, StepBudget(most, 8, 10.0))
    of_token = 2 * 4 * geometry.kv_heads * geometry.head_dim
    assert of_token < most < of_token * LENGTH
    num_seen = 0

    def after_step() -> None:
        nonlocal num_seen
        step = forward.written[num_seen:]
        num_seen = len(forward.written)
        assert sum(kv.nbytes for _, kv, _ in step) < most + of_token

    outcomes = finish(side, model, [job_of(plan)], after_step)
    assert outcomes["a"].problem is None
    with store.peek(plan.object_spans[0].key or "") as file:
        for layer in forward.layers:
            parts = [(kv, slots) for at, kv, slots in forward.written if at == layer]
            assert torch.cat([slots for _, slots in parts]).tolist() == list(range(len(HEAD), len(HEAD) + LENGTH))
            stored = np.stack([np.frombuffer(data, np.float32) for data in file.layer(layer)])
            stored = stored.reshape(2, geometry.kv_heads, LENGTH, geometry.head_dim).transpose(0, 2, 1, 3)
            assert np.array_equal(torch.cat([kv for kv, _ in parts], 1).numpy(), stored)


def test_a_step_whose_time_is_over_does_one_piece(model: Model, store: Store, plan: LinkPlan) -> None:
    """Of what is copied, or of a layer's rows: a pass goes on between its layers in the next step."""
    side, forward = start(model, store, StepBudget(10**9, 10**6, 1e-9))
    forward.num_rows, num_done = 40, [0]

    def after_step() -> None:
        done = len(forward.written) + len(forward.pieces)
        assert done - num_done[0] <= 1
        num_done[0] = done

    assert finish(side, model, [job_of(plan)], after_step)["a"].problem is None
    assert sum(forward.pieces) == 40 * forward.num_layers and len(forward.pieces) >= 3 * forward.num_layers


def test_a_step_computes_no_more_than_its_rows(model: Model, store: Store, plan: LinkPlan) -> None:
    side, forward = start(model, store, StepBudget(10**9, 8, 10.0))
    forward.num_rows, num_done, most = 100, [0], 0

    def after_step() -> None:
        nonlocal most
        assert sum(forward.pieces) - num_done[0] <= 8 * forward.num_layers
        most = max(most, sum(forward.pieces) - num_done[0])
        num_done[0] = sum(forward.pieces)

    finish(side, model, [job_of(plan)], after_step)
    assert sum(forward.pieces) == 100 * forward.num_layers
    assert most == 8 * forward.num_layers, "several pieces fit in a step"


def test_a_piece_that_fails_ends_its_jobs_alone(model: Model, store: Store, plan: LinkPlan) -> None:
    side, forward = start(model, store, StepBudget(10**9, 10**6, 1e-9))
    forward.num_rows = 40

    def fail_once(_: int) -> None:
        if len(forward.pieces) == 3:
            raise MemoryError("a fault")

    forward.work = fail_once
    first = side.step([job_of(plan)], model.target, False)
    for _ in range(100_000):
        if first:
            break
        time.sleep(1e-4)
        first = side.step([], model.target, False)
    assert first["a"].problem is not None and len(forward.pieces) == 3
    assert finish(side, model, [job_of(plan, "b")], lambda: None)["b"].problem is None


class LongPass:
    """What a narrowing policy computes: many pieces."""

    def __init__(self, *_: object) -> None: ...

    def run(self) -> Work[list[float]]:
        for _ in range(200):
            yield ForwardPiece("long", 1)
        return [1.0]


def test_a_long_pass_does_not_hold_short_ones(
    model: Model, store: Store, plan: LinkPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pictool.engines.vllm.worker.worker.NarrowingForward", LongPass)
    side, forward = start(model, store, StepBudget(10**9, 10**6, 1e-9))
    forward.num_rows, ended = 40, list[str]()
    jobs, step = [replace(job_of(plan, "long"), rows=None), job_of(plan, "short")], side.step

    def noted(*arguments: Any) -> dict[str, JobResult]:
        outcomes: dict[str, JobResult] = step(*arguments)
        ended.extend(outcomes)
        return outcomes

    side.step = noted
    finish(side, model, jobs, lambda: None)
    assert ended == ["short", "long"]


@pytest.mark.parametrize("fails", [None, 0, 1])
def test_ranks_compute_the_same_pieces(model: Model, store: Store, plan: LinkPlan, fails: int | None) -> None:
    """However long each takes on which; and what fails on one has failed on all."""
    ranks, results = Ranks(2), dict[int, Any]()

    def run(rank: int) -> None:
        side, forward = start(model, store.root, StepBudget(10**9, 10**6, (1e-9, 10.0)[rank]), ranks, rank)
        forward.num_rows = 40

        def work(_: int) -> None:
            if rank == fails and len(forward.pieces) == 4:
                raise MemoryError("a fault")

        forward.work = work
        results[rank] = (finish(side, model, [job_of(plan)], lambda: None)["a"].problem, forward.pieces)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results[0] == results[1]
    problem, pieces = results[0]
    assert (problem is None) == (fails is None)
    assert Counter(pieces).total() >= 4 if fails is not None else sum(pieces) == 40 * model.geometry.layers


def test_threads_that_read_yield_to_the_engine(model: Model, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr("pictool.engines.vllm.worker.worker.background_threads", lambda most, name: names.append(name))
    start(model, store, StepBudget(1, 1))
    assert names == ["pic-read"]


def test_what_nobody_waits_for_comes_after_all_links_one_piece_a_step(
    model: Model, store: Store, plan: LinkPlan
) -> None:
    side, forward = start(model, store, StepBudget(10**9, 10**6, 10.0))
    forward.num_rows, later = 40, list[int]()

    def work() -> Work[Sequence[float]]:
        for _ in range(30):
            later.append((yield ForwardPiece("later", 50)))
        return [0.0]

    side._later.append(_Computing({"later": JobResult()}, work()))
    outcomes, jobs = dict[str, JobResult](), [job_of(plan)]
    while len(outcomes) < 2:
        done = len(forward.written) + len(forward.pieces), len(later)
        is_idle = len(later) > 10
        outcomes |= side.step(jobs, model.target, is_idle)
        jobs = []
        of_links, of_later = len(forward.written) + len(forward.pieces) - done[0], len(later) - done[1]
        assert not (of_links and of_later) and (is_idle or of_later <= 1)
        time.sleep(1e-4)
    side.shutdown()
    assert outcomes["a"].problem is None and outcomes["later"].problem is None and len(later) == 30
