"""The workload of `pic bench async`: user sets, and streams of requests that are drawn before anything is executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pictool.bench.prompts import num_variants
from pictool.bench.queueing import Load, Seconds
from pictool.bench.users import User, UserSet, compile_users
from pictool.compiler.compile import CODEC
from pictool.compiler.sensitivity import PROBES
from pictool.core import CompileOptions
from pictool.errors import InputError
from pictool.linker.grid import Labelled
from pictool.linker.policies import BASELINE, make_policy, object_kinds
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

REFERENCE = BASELINE  # the label whose scores say what a good answer is


@dataclass(frozen=True)
class Traffic:
    """What arrives: at each rate, `repeats` runs with different seeds.

    Fields:
        measured: requests that are executed per user set and policy; others draw from them. 0 executes every one.
        gamma_share: of the mean score of `full`; an answer of this score is good.
    """

    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    duration: float = 40.0
    requests: int | None = None
    repeats: int = 5
    seed: int = 0
    measured: int = 20
    gamma_share: float = 0.8

    def __post_init__(self) -> None:
        if not self.rates:
            raise InputError("no rate of requests; name some with --rate")
        for name, least in (("repeats", 1), ("measured", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)}: must be {least} or more")
        if not 0 < self.gamma_share <= 1:
            raise InputError(f"--gamma-share {self.gamma_share:g}: must be above 0 and at most 1")
        _ = self.loads

    @property
    def loads(self) -> list[Load]:
        return [Load(rate, self.duration, self.requests) for rate in dict.fromkeys(self.rates)]


@dataclass(frozen=True)
class Request:
    """One request of a run: the indices of user and question, and a number in [0, 1) to draw a measured one with."""

    user: int
    question: int
    pick: float


@dataclass(frozen=True)
class Stream:
    """The requests of one run, and when each arrives."""

    rate: float
    arrivals: Seconds
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Workload:
    """Policies × user sets × streams; the users of a set are the first of those of a larger one.

    Fields:
        streams: of each user set.
        measured, gamma_share: as of `Traffic`.
    """

    policies: tuple[Labelled, ...]
    user_sets: tuple[UserSet, ...]
    streams: tuple[tuple[Stream, ...], ...]
    measured: int
    gamma_share: float

    @property
    def is_scored(self) -> bool:
        """Whether questions have right answers; then each is executed once."""
        return any(question.metric for user in self.user_sets[-1].users for question in user.questions)

    @cached_property
    def executed_policies(self) -> list[Labelled]:
        """The policies that are measured, and the reference of scores."""
        labels = [labelled.label for labelled in self.policies]
        needs_reference = self.is_scored and REFERENCE not in labels
        return [*self.policies, *([Labelled(REFERENCE, make_policy(REFERENCE))] if needs_reference else [])]

    def is_sampled(self, number: int) -> bool:
        """Whether only some requests of a user set are executed, and the others are drawn from them."""
        return 0 < self.measured < self._num_requests(number)

    @property
    def object_kinds(self) -> list[CompileOptions]:
        """How documents are compiled for the policies that are executed."""
        return object_kinds([labelled.policy for labelled in self.executed_policies], CODEC, PROBES)

    @property
    def object_bytes(self) -> int:
        """K and V of all objects in the store."""
        return self.user_sets[-1].num_bytes * num_variants(self.object_kinds)

    @property
    def num_objects(self) -> int:
        """Documents to compile, in each kind; without heads."""
        return sum(len(user.documents) for user in self.user_sets[-1].users) * len(self.object_kinds)

    def compile(self, model: Model, store: Store, on_done: Callable[[], None] = lambda: None) -> None:
        """Put the objects of all users into the store; those of questions with answers each by itself."""
        compile_users(model, store, self.user_sets[-1].users, self.object_kinds, self.is_scored, on_done)

    @property
    def num_executions(self) -> int:
        """Requests that will be executed, without those that warm up."""
        if self.is_scored:
            return self.user_sets[-1].num_questions * len(self.executed_policies)
        sets = range(len(self.user_sets))
        each = [self.measured if self.is_sampled(number) else self._num_requests(number) for number in sets]
        return sum(each) * len(self.executed_policies)

    def _num_requests(self, number: int) -> int:
        return sum(len(stream.requests) for stream in self.streams[number])


def make_workload(policies: Sequence[Labelled], user_sets: Sequence[UserSet], traffic: Traffic) -> Workload:
    """Draw all requests. The same seed, rate and users give the same, whatever else is in the workload.

    Raises:
        InputError: a run without any request.
    """
    ordered = tuple(sorted(user_sets, key=lambda user_set: len(user_set.users)))
    streams = tuple(
        tuple(_draw(load, user_set.users, traffic.seed, i) for load in traffic.loads for i in range(traffic.repeats))
        for user_set in ordered
    )
    return Workload(tuple(policies), ordered, streams, traffic.measured, traffic.gamma_share)


def _draw(load: Load, users: Sequence[User], seed: int, repeat: int) -> Stream:
    draw = np.random.default_rng([seed, repeat])
    arrivals = load.draw_arrivals(draw)
    if not len(arrivals):
        raise InputError(f"--rate {load.rate:g}: nothing arrives in {load.duration:g} s; use --duration or --requests")
    requests = []
    for user_share, question_share, pick in draw.random((len(arrivals), 3)).tolist():
        user = int(user_share * len(users))
        requests.append(Request(user, int(question_share * len(users[user].questions)), pick))
    return Stream(load.rate, arrivals, tuple(requests))
