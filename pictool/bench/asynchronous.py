"""Many users at once (EPIC §5.2, §5.5): latency, throughput and goodput by policy, rate of arrivals and users.

Requests arrive as a Poisson process and are served one at a time, first come, first served: our engine has no
continuous batching, so that throughput ends at one request per service time, where a serving system goes on. The queue
runs on a virtual clock with service times that were measured one request after another, so that nobody waits for
arrivals; a request's TTFT and latency include its time in the queue. Rates beyond throughput have no steady state: the
longer requests arrive, the longer the queue.

The context cache ratio (CCR) is EPIC's: bytes of the users' objects by the memory of the device. Objects are read from
the store as everywhere in pictool, and take no memory from computing as they do in EPIC.

Goodput is SpecCache's (eq. 8): answers of a score of at least γ, a share of the mean score of `full` over the same
questions, by the simulated duration H, which ends when the last request is served.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pictool.bench.arrivals import serve
from pictool.bench.service import ByLabel, Drawn, EveryQuestion, EveryRequest, Runner, Sample, Service
from pictool.bench.traffic import REFERENCE, Plan, Stream
from pictool.bench.user_sets import UserSet
from pictool.bench.users import Executed
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

NO_SCORES = "random prompts have no right answers; name a --dataset"
NO_GOOD = "full answers no question right, so any answer would do"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Figures:
    """One run: seconds of the virtual clock, and requests per second. Without scores there is no goodput."""

    requests: int
    duration_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    latency_mean_s: float
    waiting_mean_s: float
    throughput: float
    goodput: float | None
    utilisation: float


@dataclass(frozen=True)
class Point:
    """All runs of one policy (its `label` in tables, its name), user set and rate."""

    label: str
    algo: str
    users: int
    ccr: float | None
    rate: float
    runs: tuple[Figures, ...]

    def mean(self, name: str) -> float | None:
        values = [getattr(run, name) for run in self.runs]
        return None if None in values else statistics.fmean(values)

    def deviation(self, name: str) -> float | None:
        """The standard deviation over the runs; None for a single one."""
        values = [getattr(run, name) for run in self.runs]
        return None if None in values or len(values) < 2 else statistics.stdev(values)

    def report(self) -> dict[str, Any]:
        names = list(vars(self.runs[0]))
        return {
            "label": self.label, "algo": self.algo, "users": self.users, "ccr": self.ccr, "rate": self.rate,
            "mean": {name: self.mean(name) for name in names},
            "deviation": {name: self.deviation(name) for name in names},
            "runs": [vars(run) for run in self.runs],
        }  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What was executed for one user set. `gamma` is the score of a good answer, None if there is none; then `why`."""

    users: UserSet
    samples: tuple[Sample, ...]
    gamma: float | None
    why: str | None

    def report(self) -> dict[str, Any]:
        return {
            "users": len(self.users.users), "bytes": self.users.num_bytes, "ccr": self.users.ccr,
            "gamma": self.gamma, "no_goodput": self.why,
            "executed": [
                {"user": one.user, "question": self.users.users[one.user].questions[one.question].id,
                 "label": label, **vars(done)}
                for one in self.samples for label, done in one.by_label.items()
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class AsyncResult:
    """Points by user set, rate and policy; and what they stand on."""

    points: tuple[Point, ...]
    measured: tuple[Measured, ...]


def measure_async(model: Model, store: Store, plan: Plan, on_step: Callable[[], None] = lambda: None) -> AsyncResult:
    """Compile what is not compiled yet, execute requests, and let them queue.

    Args:
        on_step: called after each of `plan.executions`.

    Raises:
        PicError: see `link`.
    """
    everyone = plan.sets[-1].users
    plan.compile(model, store)
    runner = Runner(model, store, plan.executed, on_step)
    runner.warm_up(everyone[0])
    once = EveryQuestion(runner, everyone) if plan.is_scored else None
    points, measured = [], []
    for number, one in enumerate(plan.sets):
        start = 0 if once else len(runner.done)
        service = once or _service(plan, number, runner)
        served = [[service.serve(asked) for asked in stream.asked] for stream in plan.streams[number]]
        samples = [sample for sample in runner.done[start:] if sample.user < len(one.users)]
        gamma, why = _gamma(samples, plan.gamma_share)
        measured.append(Measured(one, tuple(samples), gamma, why))
        points += _points(plan, one, plan.streams[number], served, gamma)
    return AsyncResult(tuple(points), tuple(measured))


def _service(plan: Plan, number: int, runner: Runner) -> Service:
    users = plan.sets[number].users
    return Drawn(runner, users, plan.measured) if plan.draws(number) else EveryRequest(runner, users)


def _gamma(samples: Sequence[Sample], share: float) -> tuple[float | None, str | None]:
    """The score of a good answer; or None, and why there is none."""
    scores = [one.by_label[REFERENCE].score for one in samples if REFERENCE in one.by_label]
    known = [score for score in scores if score is not None]
    if not known:
        return None, NO_SCORES
    gamma = share * statistics.fmean(known)
    return (gamma, None) if gamma > 0 else (None, NO_GOOD)


def _points(
    plan: Plan, users: UserSet, streams: Sequence[Stream], served: Sequence[Sequence[ByLabel]], gamma: float | None
) -> list[Point]:
    points = []
    for rate in dict.fromkeys(stream.rate for stream in streams):
        for one in plan.policies:
            runs = [
                _figures(stream, [request[one.label] for request in requests], gamma)
                for stream, requests in zip(streams, served, strict=True)
                if stream.rate == rate
            ]
            points.append(Point(one.label, one.policy.name, len(users.users), users.ccr, rate, tuple(runs)))
    return points


def _figures(stream: Stream, requests: Sequence[Executed], gamma: float | None) -> Figures:
    served = serve(stream.arrivals, [one.ttft_s for one in requests], [one.service_s for one in requests])
    good = None if gamma is None else sum((one.score or 0.0) >= gamma - _ROUNDING for one in requests)
    p50, p99 = np.percentile(served.ttft, (50, 99)).tolist()
    return Figures(
        requests=len(requests),
        duration_s=served.duration,
        ttft_mean_s=float(served.ttft.mean()),
        ttft_p50_s=p50,
        ttft_p99_s=p99,
        latency_mean_s=float(served.latency.mean()),
        waiting_mean_s=float(served.waiting.mean()),
        throughput=served.throughput,
        goodput=None if good is None else good / served.duration,
        utilisation=served.utilisation,
    )
