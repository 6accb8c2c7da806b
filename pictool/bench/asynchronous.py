"""Many users at once (EPIC §5.2, §5.5): latency, throughput and goodput by policy, rate of arrivals and users.

Requests arrive as a Poisson process and are served one at a time, first come, first served: our engine has no
continuous batching, so that throughput ends at one request per service time, where a serving system goes on. The queue
runs on a virtual clock with service times that were measured one request after another, so that nobody waits for
arrivals; a request's TTFT and latency include its time in the queue. Rates beyond throughput have no steady state: the
longer requests arrive, the longer the queue.

The context cache ratio (CCR) is EPIC's: bytes of the users' objects by the memory of the device. Objects are read from
the store as everywhere in pictool, and take no memory from computing as they do in EPIC.

Goodput is SpecCache's (eq. 8): answers of a score of at least γ, a share of the mean score of `full` over the same
questions, by the simulated duration H, which ends when the last request is done.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pictool.bench.queueing import serve_in_order
from pictool.bench.repeats import rotated
from pictool.bench.traffic import REFERENCE, Request, Stream, Workload
from pictool.bench.users import ExecutedRequest, User, UserSet, execute
from pictool.linker.grid import Labelled
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

NO_SCORES = "random prompts have no right answers; name a --dataset"
NO_GOOD = "full answers no question right, so any answer would do"
_ROUNDING = 1e-9
ByLabel = Mapping[str, ExecutedRequest]


@dataclass(frozen=True)
class Figures:
    """One run: seconds of the virtual clock, and requests per second. Without scores there is no goodput.

    Fields are the keys of the JSON.
    """

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
class LoadPoint:
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
class Execution:
    """A question that was executed under every policy; `user` and `question` are indices."""

    user: int
    question: int
    by_label: ByLabel


@dataclass(frozen=True)
class UserSetResult:
    """What was executed for one user set. `gamma`: the score of a good answer; None if there is none, and then why."""

    user_set: UserSet
    executions: tuple[Execution, ...]
    gamma: float | None
    no_goodput: str | None

    def report(self) -> dict[str, Any]:
        users = self.user_set.users
        return {
            "users": len(users), "bytes": self.user_set.num_bytes, "ccr": self.user_set.ccr,
            "gamma": self.gamma, "no_goodput": self.no_goodput,
            "executed": [
                {"user": execution.user, "question": users[execution.user].questions[execution.question].id,
                 "label": label, **vars(executed)}
                for execution in self.executions for label, executed in execution.by_label.items()
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class AsyncResult:
    """Points by user set, rate and policy; and the executions from which they were computed."""

    points: tuple[LoadPoint, ...]
    user_sets: tuple[UserSetResult, ...]


def bench_async(
    model: Model, store: Store, workload: Workload, on_step: Callable[[], None] = lambda: None
) -> AsyncResult:  # fmt: skip
    """Compile what is not compiled yet, execute requests, and compute how they queue.

    Args:
        on_step: called after each of `workload.num_executions`.

    Raises:
        PicError: see `link`.
    """
    users = workload.user_sets[-1].users
    workload.compile(model, store)
    executor = Executor(model, store, workload.executed_policies, on_step)
    executor.warm_up(users[0])
    per_question = ExecutedPerQuestion(executor, users) if workload.is_scored else None
    points, results = [], []
    for number, user_set in enumerate(workload.user_sets):
        start = 0 if per_question else len(executor.executions)
        service = per_question or _service(workload, number, executor)
        streams = workload.streams[number]
        served = [[service.serve(request) for request in stream.requests] for stream in streams]
        executions = [each for each in executor.executions[start:] if each.user < len(user_set.users)]
        gamma, no_goodput = _gamma(executions, workload.gamma_share)
        results.append(UserSetResult(user_set, tuple(executions), gamma, no_goodput))
        points += _points(workload, user_set, streams, served, gamma)
    return AsyncResult(tuple(points), tuple(results))


@dataclass
class Executor:
    """Executes questions under every policy, each time beginning with another policy; keeps what was executed.

    A request takes what it took alone on the machine; waiting is added by the queue.
    """

    model: Model
    store: Store
    policies: Sequence[Labelled]
    on_step: Callable[[], None] = lambda: None
    executions: list[Execution] = field(default_factory=list)

    def warm_up(self, user: User) -> None:
        """Run every policy once, so that loading and allocating for the first time is not measured."""
        for labelled in self.policies:
            execute(self.model, self.store, labelled.policy, user.questions[0])

    def run(self, users: Sequence[User], user: int, question: int) -> Execution:
        by_label = {}
        for labelled in rotated(self.policies, len(self.executions)):
            by_label[labelled.label] = execute(self.model, self.store, labelled.policy, users[user].questions[question])
            self.on_step()
        self.executions.append(Execution(user, question, by_label))
        return self.executions[-1]


class Service(ABC):
    """Where the service times of requests come from."""

    @abstractmethod
    def serve(self, request: Request) -> ByLabel:
        """What this request takes, and its score, under every policy."""


class ExecutedPerRequest(Service):
    """Every request is executed."""

    def __init__(self, executor: Executor, users: Sequence[User]) -> None:
        self._executor, self._users = executor, users

    def serve(self, request: Request) -> ByLabel:
        return self._executor.run(self._users, request.user, request.question).by_label


class ExecutedPerQuestion(Service):
    """Every distinct question is executed once; each request of it takes the same."""

    def __init__(self, executor: Executor, users: Sequence[User]) -> None:
        self._by_question = {
            (i, j): executor.run(users, i, j).by_label
            for i, user in enumerate(users)
            for j in range(len(user.questions))
        }

    def serve(self, request: Request) -> ByLabel:
        return self._by_question[request.user, request.question]


class Sampled(Service):
    """So many requests are executed, of one user after another; every request takes what a random one of them took.

    It is one of the same user if any of this user's were executed, else one of all.
    """

    def __init__(self, executor: Executor, users: Sequence[User], count: int) -> None:
        executions = [executor.run(users, i % len(users), 0) for i in range(count)]
        self._all = [execution.by_label for execution in executions]
        self._of_user = {
            number: [execution.by_label for execution in executions if execution.user == number]
            for number in range(len(users))
        }

    def serve(self, request: Request) -> ByLabel:
        choices = self._of_user[request.user] or self._all
        return choices[int(request.pick * len(choices))]


def _service(workload: Workload, number: int, executor: Executor) -> Service:
    users = workload.user_sets[number].users
    if workload.is_sampled(number):
        return Sampled(executor, users, workload.measured)
    return ExecutedPerRequest(executor, users)


def _gamma(executions: Sequence[Execution], share: float) -> tuple[float | None, str | None]:
    """The score of a good answer; or None, and why there is none."""
    scores = [execution.by_label[REFERENCE].score for execution in executions if REFERENCE in execution.by_label]
    known = [score for score in scores if score is not None]
    if not known:
        return None, NO_SCORES
    gamma = share * statistics.fmean(known)
    return (gamma, None) if gamma > 0 else (None, NO_GOOD)


def _points(
    workload: Workload, user_set: UserSet, streams: Sequence[Stream], served: Sequence[Sequence[ByLabel]],
    gamma: float | None,
) -> list[LoadPoint]:  # fmt: skip
    """The points of one user set. `served` has, for every stream, what each of its requests took."""
    points = []
    num_users = len(user_set.users)
    for rate in dict.fromkeys(stream.rate for stream in streams):
        for labelled in workload.policies:
            runs = [
                _figures(stream, [by_label[labelled.label] for by_label in requests], gamma)
                for stream, requests in zip(streams, served, strict=True)
                if stream.rate == rate
            ]
            points.append(LoadPoint(labelled.label, labelled.policy.name, num_users, user_set.ccr, rate, tuple(runs)))
    return points


def _figures(stream: Stream, requests: Sequence[ExecutedRequest], gamma: float | None) -> Figures:
    ttft, service = ([request.ttft_s for request in requests], [request.service_s for request in requests])
    times = serve_in_order(stream.arrivals, ttft, service)
    good = None if gamma is None else sum((request.score or 0.0) >= gamma - _ROUNDING for request in requests)
    p50, p99 = np.percentile(times.ttft, (50, 99)).tolist()
    return Figures(
        requests=len(requests),
        duration_s=times.duration,
        ttft_mean_s=float(times.ttft.mean()),
        ttft_p50_s=p50,
        ttft_p99_s=p99,
        latency_mean_s=float(times.latency.mean()),
        waiting_mean_s=float(times.waiting.mean()),
        throughput=times.throughput,
        goodput=None if good is None else good / times.duration,
        utilisation=times.utilisation,
    )
