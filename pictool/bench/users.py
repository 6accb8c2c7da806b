"""Users of `pic bench async` (EPIC §5.2): each has documents of its own, compiled once, and questions about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pictool.bench.workload import random_chunks, random_tail, require_positions
from pictool.compiler.compile import compile_chunks
from pictool.controller.calibration import token_bytes
from pictool.core import Chunk, CompileOptions, Sampling
from pictool.errors import InputError
from pictool.eval.datasets.base import Dataset
from pictool.eval.metrics import METRICS
from pictool.eval.units import Question as CaseQuestion
from pictool.eval.units import Settings, Unit, make_units
from pictool.linker.link import link
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Question:
    """What stands around a user's documents, and what answers are right; without a metric there is no score."""

    id: str
    head: str
    tail: str
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    metric: str | None = None
    answers: tuple[str, ...] = ()

    def score(self, text: str) -> float | None:
        return METRICS[self.metric](text, self.answers) if self.metric else None


@dataclass(frozen=True)
class User:
    """Documents, and the questions that are asked about them."""

    documents: tuple[Chunk, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Executed:
    """A request that really ran: seconds from its start to its first and its last token, tokens generated, score."""

    ttft_s: float
    service_s: float
    tokens: int
    score: float | None


@dataclass(frozen=True)
class RandomWorkload:
    """What every user has where there is no dataset: random chunks, and one question that it repeats."""

    chunks: int = 8
    chunk_tokens: int = 512
    tail_tokens: int = 32
    new_tokens: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be 1 or more")

    @property
    def context(self) -> int:
        """Tokens of a user's documents."""
        return self.chunks * self.chunk_tokens

    def require_fit(self, model: Model) -> None:
        """Refuse longer prompts than the model takes.

        Raises:
            InputError: says how much is too much.
        """
        total = self.context + self.tail_tokens + self.new_tokens
        require_positions(model, total, "fewer --chunks, --chunk-tokens or --new-tokens")

    def users(self, model: Model, count: int, seed: int) -> list[User]:
        """Users with different documents.

        Raises:
            InputError: longer prompts than the model takes.
        """
        self.require_fit(model)

        def user(number: int) -> User:
            own = (seed << 32) + number
            chunks = random_chunks(model, self.chunks, self.chunk_tokens, own)
            tail = random_tail(model, self.tail_tokens, own)
            return User(tuple(chunks), (Question(str(number), "", tail, self.new_tokens),))

        return [user(number) for number in range(count)]


def dataset_users(
    model: Model, dataset: Dataset, settings: Settings, skip_long: bool = False
) -> tuple[list[User], int]:
    """The document sets of a dataset, each with its questions, in the order in which they come; and cases left out.

    Args:
        skip_long: leave out cases that do not fit the model, instead of refusing them.

    Raises:
        InputError: a dataset that cannot be read, or a case that this model cannot take; names it.
    """
    made = make_units(model, dataset.cases(), settings, skip_long)
    found: dict[tuple[tuple[int, ...], ...], list[Unit]] = {}
    for unit in made.units:
        found.setdefault(tuple(chunk.tokens for chunk in unit.chunks), []).append(unit)
    if not found:
        raise InputError(f"{dataset.name}: no case fits {model.name}; use a model that takes longer prompts")
    return [_user(units) for units in found.values()], len(made.skipped)


def _user(units: Sequence[Unit]) -> User:
    return User(units[0].chunks, tuple(_question(one) for unit in units for one in unit.questions))


def _question(one: CaseQuestion) -> Question:
    case = one.case
    return Question(case.id, one.frame.head, one.frame.tail, one.max_new_tokens, case.stop, case.metric, case.answers)


def kv_bytes(model: Model, users: Iterable[User]) -> int:
    """Bytes of K and V of the users' objects, each once: documents and heads."""
    return sum(added_bytes(model, users))


def added_bytes(model: Model, users: Iterable[User]) -> Iterator[int]:
    """Bytes of K and V of the objects of each user that none before it has."""
    seen: set[tuple[int, ...]] = set()
    for user in users:
        mine = {chunk.tokens for chunk in user.documents} | {model.encode(head) for head in _heads([user])}
        yield sum(map(len, mine - seen)) * token_bytes(model)
        seen |= mine


def _heads(users: Iterable[User]) -> list[str]:
    return list(dict.fromkeys(question.head for user in users for question in user.questions))


def compile_users(
    model: Model, store: Store, users: Sequence[User], kinds: Sequence[CompileOptions], alone: bool = False,
    on_done: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Compile what the users' requests link: documents in each of these kinds, and heads.

    Args:
        alone: each in a forward of its own, so that answers do not depend on what is compiled together.
        on_done: called after each document.
    """
    heads = [Chunk(head, tokens, "head") for head in _heads(users) if (tokens := model.encode(head))]
    compile_chunks(model, store, heads, alone=alone)
    documents = [chunk for user in users for chunk in user.documents]
    for kind in kinds:
        compile_chunks(model, store, documents, kind, alone=alone, on_done=lambda _: on_done())


def execute(model: Model, store: Store, policy: Policy, user: User, question: Question) -> Executed:
    """Link and decode one request."""
    linked = link(model, store, Spec.raw(user.documents, question.tail, policy, question.head))
    started = time.perf_counter()
    generated = generate(model, linked.image, question.max_new_tokens, Sampling(stop=question.stop))
    service_s = linked.timing.ttft_s + time.perf_counter() - started
    return Executed(linked.timing.ttft_s, service_s, len(generated.tokens), question.score(generated.text.strip()))
