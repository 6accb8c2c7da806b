"""How long requests take, and how good their answers are: all are executed, or so many that others draw from them.

What a request took is what it took alone on the machine; waiting is the queue's (`arrivals.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pictool.bench.users import Executed, User, execute
from pictool.linker.grid import Labelled
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

ByLabel = Mapping[str, Executed]


@dataclass(frozen=True)
class Asked:
    """One request of a run: whose it is, which of the user's questions, and a number in [0, 1) to draw with."""

    user: int
    question: int
    pick: float


@dataclass(frozen=True)
class Sample:
    """One request that was executed under every policy."""

    user: int
    question: int
    by_label: ByLabel


@dataclass
class Runner:
    """Executes requests under every policy, in rounds that begin with another one each time; keeps what it did."""

    model: Model
    store: Store
    policies: Sequence[Labelled]
    on_step: Callable[[], None] = lambda: None
    done: list[Sample] = field(default_factory=list)

    def warm_up(self, user: User) -> None:
        """Run every policy once: what is loaded or allocated at first does not count."""
        for one in self.policies:
            execute(self.model, self.store, one.policy, user, user.questions[0])

    def run(self, users: Sequence[User], user: int, question: int) -> Sample:
        first = len(self.done) % len(self.policies)
        by_label = {}
        for one in [*self.policies[first:], *self.policies[:first]]:
            asked = users[user].questions[question]
            by_label[one.label] = execute(self.model, self.store, one.policy, users[user], asked)
            self.on_step()
        self.done.append(Sample(user, question, by_label))
        return self.done[-1]


class Service(ABC):
    """Where the times of requests come from."""

    @abstractmethod
    def serve(self, asked: Asked) -> ByLabel:
        """What this request takes, and its score, under every policy."""


class EveryRequest(Service):
    """Every request is executed."""

    def __init__(self, runner: Runner, users: Sequence[User]) -> None:
        self._runner, self._users = runner, users

    def serve(self, asked: Asked) -> ByLabel:
        return self._runner.run(self._users, asked.user, asked.question).by_label


class EveryQuestion(Service):
    """Every distinct question is executed once; who asks it again gets the same."""

    def __init__(self, runner: Runner, users: Sequence[User]) -> None:
        self._samples = {
            (i, j): runner.run(users, i, j).by_label for i, user in enumerate(users) for j in range(len(user.questions))
        }

    def serve(self, asked: Asked) -> ByLabel:
        return self._samples[asked.user, asked.question]


class Drawn(Service):
    """So many requests are executed, of one user after another; the others are drawn from them.

    From those of the same user if there are any, else from all.
    """

    def __init__(self, runner: Runner, users: Sequence[User], count: int) -> None:
        samples = [runner.run(users, i % len(users), 0) for i in range(count)]
        self._all = [one.by_label for one in samples]
        self._of_user = {
            number: [one.by_label for one in samples if one.user == number] for number in range(len(users))
        }

    def serve(self, asked: Asked) -> ByLabel:
        choices = self._of_user[asked.user] or self._all
        return choices[int(asked.pick * len(choices))]
