"""Users of `pic bench async` (EPIC §5.2): each has documents of its own, compiled once, and questions about them.

How many users send requests together is a number, or what fills a share of the device's memory: the context cache
ratio (CCR) is EPIC's, bytes of the users' objects by the memory of the device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.bench.prompts import random_chunks, random_tail, require_disk, require_positions
from pictool.compiler.compile import compile_chunks
from pictool.controller.calibration import token_bytes
from pictool.core import Chunk, CompileOptions
from pictool.errors import InputError
from pictool.eval.cases import CaseGroup, PreparedCase, SpecOptions, group_cases
from pictool.eval.datasets.base import Dataset
from pictool.eval.metrics import METRICS
from pictool.linker.link import link
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.device import device_memory as accelerator_memory
from pictool.runtime.machine import memory_bytes
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Question:
    """A question of a user.

    Fields:
        spec: asks it over the user's documents; its policy is replaced by each that is measured.
        metric: scores an answer against `answers`; None: there is no score.
    """

    id: str
    spec: Spec
    metric: str | None = None
    answers: tuple[str, ...] = ()

    def score(self, text: str) -> float | None:
        return METRICS[self.metric](text, self.answers) if self.metric else None


@dataclass(frozen=True)
class User:
    """Documents, and the questions about them."""

    documents: tuple[Chunk, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class UserSet:
    """Users that send requests together; bytes of K and V of their objects; these by the memory, if that is known."""

    users: tuple[User, ...]
    num_bytes: int
    ccr: float | None

    @property
    def num_questions(self) -> int:
        return sum(len(user.questions) for user in self.users)


@dataclass(frozen=True)
class RandomUsers:
    """Users where there is no dataset: each has random chunks, and one question that it repeats."""

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

    def make(self, model: Model, count: int, seed: int) -> list[User]:
        """Make users with different documents.

        Raises:
            InputError: longer prompts than the model takes.
        """
        self.require_fit(model)
        return [self._user(model, number, (seed << 32) + number) for number in range(count)]

    def _user(self, model: Model, number: int, seed: int) -> User:
        chunks = tuple(random_chunks(model, self.chunks, self.chunk_tokens, seed))
        spec = Spec(
            random_tail(model, self.tail_tokens, seed), chunks, head="", max_new_tokens=self.new_tokens, is_raw=True
        )  # fmt: skip
        return User(chunks, (Question(str(number), spec),))


def dataset_users(
    model: Model, dataset: Dataset, options: SpecOptions, skip_long: bool = False
) -> tuple[list[User], int]:
    """The document sets of a dataset, each with its questions, in the dataset's order; and how many cases are left out.

    Args:
        skip_long: leave out cases that do not fit the model, instead of refusing them.

    Raises:
        InputError: a dataset that cannot be read, a case that this model cannot take (its id is named), or a metric
            whose package is not installed.
    """
    grouped = group_cases(model, dataset.cases(), options, skip_long)
    by_documents: dict[tuple[tuple[int, ...], ...], list[CaseGroup]] = {}
    for group in grouped.groups:
        by_documents.setdefault(tuple(chunk.tokens for chunk in group.chunks), []).append(group)
    if not by_documents:
        raise InputError(f"{dataset.name}: no case fits {model.name}; use a model that takes longer prompts")
    for metric in {prepared.case.metric for group in grouped.groups for prepared in group.cases}:
        METRICS[metric]("", [""])  # fails now if it cannot be computed, and not after the requests
    return [_user_of(groups) for groups in by_documents.values()], len(grouped.skipped)


def _user_of(groups: Sequence[CaseGroup]) -> User:
    chunks = groups[0].chunks
    return User(chunks, tuple(_question(prepared, chunks) for group in groups for prepared in group.cases))


def _question(prepared: PreparedCase, chunks: tuple[Chunk, ...]) -> Question:
    """The question of a case. Its spec has the texts of head and tail, so that no template is applied in a request."""
    case, frame = prepared.case, prepared.frame
    spec = replace(prepared.spec, documents=chunks, query=frame.tail, head=frame.head, is_raw=True)
    return Question(case.id, spec, case.metric, case.answers)


@dataclass(frozen=True)
class UserCounts:
    """How many users: numbers, or else context cache ratios. `memory` is the device's, in bytes; None: as it says."""

    counts: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    memory: int | None = None

    def __post_init__(self) -> None:
        for option, values in (("users", self.counts), ("ccr", self.ratios), ("memory", (self.memory,))):
            if wrong := [value for value in values if value is not None and not 0 < value < float("inf")]:
                raise InputError(f"--{option} {wrong[0]:g}: must be above 0")

    def choose(self, memory: int | None, sizes: Iterable[int], source: str) -> list[int]:
        """Choose numbers of users, ascending, where each user adds objects of the next of `sizes` bytes.

        Args:
            source: what the users are, for messages.

        Raises:
            InputError: the memory is unknown, or there are too few users.
        """
        if not self.ratios:
            return sorted(set(self.counts))
        if memory is None:
            raise InputError("--ccr: this system does not tell how much memory it has; say it with --memory")
        chosen = set()
        for ratio in self.ratios:
            count = count_of_users(ratio * memory, sizes)
            if count is None:
                raise InputError(f"--ccr {ratio:g}: {source} fill less of {memory:,} bytes; use less, or less --memory")
            chosen.add(count)
        return sorted(chosen)


def random_user_sets(
    model: Model, random_users: RandomUsers, counts: UserCounts, seed: int, directory: Path
) -> list[UserSet]:
    """User sets of random documents; the users of one are the first of the next.

    Raises:
        InputError: prompts that the model cannot take, unknown memory, or objects that do not fit into `directory`.
    """
    random_users.require_fit(model)
    memory = counts.memory or device_memory(model)
    each = random_users.context * token_bytes(model)
    most = [count * each for count in counts.counts] + [ratio * memory for ratio in counts.ratios if memory]
    require_disk(directory, int(max(most, default=0)))
    chosen = counts.choose(memory, itertools.repeat(each), "random users")
    return make_user_sets(model, random_users.make(model, chosen[-1], seed), chosen, memory)


def dataset_user_sets(model: Model, users: Sequence[User], counts: UserCounts, name: str) -> list[UserSet]:
    """User sets of the first users of a dataset, which is called `name`.

    Raises:
        InputError: there are not so many, or unknown memory.
    """
    memory = counts.memory or device_memory(model)
    chosen = counts.choose(memory, list(added_bytes(model, users)), f"the {len(users)} document sets of {name}")
    if chosen[-1] > len(users):
        raise InputError(f"--users {chosen[-1]}: {name} has {len(users)} document sets, one for each user")
    return make_user_sets(model, users, chosen, memory)


def make_user_sets(model: Model, users: Sequence[User], counts: Iterable[int], memory: int | None) -> list[UserSet]:
    """For every count, the set of so many of the first users."""
    sets = []
    for count in sorted(set(counts)):
        num_bytes = kv_bytes(model, users[:count])
        sets.append(UserSet(tuple(users[:count]), num_bytes, num_bytes / memory if memory else None))
    return sets


def count_of_users(target: float, sizes: Iterable[int]) -> int | None:
    """How many objects of these bytes come nearest to `target` bytes, at least one; None if all are too few."""
    total, count, size = 0, 0, 0
    for size in sizes:
        if count and total + size / 2 > target:
            return count
        total, count = total + size, count + 1
    return count if count and total + size / 2 > target else None


def device_memory(model: Model) -> int | None:
    """Bytes of memory of the device on which the model runs."""
    known = accelerator_memory(model.device)
    return memory_bytes() if known is None else known[1]


def kv_bytes(model: Model, users: Iterable[User]) -> int:
    """Bytes of K and V of the users' objects, each once: documents and heads."""
    return sum(added_bytes(model, users))


def added_bytes(model: Model, users: Iterable[User]) -> Iterator[int]:
    """Bytes of K and V of the objects of each user that no user before it has."""
    seen: set[tuple[int, ...]] = set()
    for user in users:
        tokens = {chunk.tokens for chunk in user.documents} | {model.encode(head) for head in _heads([user])}
        yield sum(map(len, tokens - seen)) * token_bytes(model)
        seen |= tokens


def _heads(users: Iterable[User]) -> list[str]:
    return list(dict.fromkeys(question.spec.head or "" for user in users for question in user.questions))


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


@dataclass(frozen=True)
class ExecutedRequest:
    """What a request took: seconds from its start to its first and its last token, tokens generated, score.

    Fields are the keys of the JSON.
    """

    ttft_s: float
    service_s: float
    tokens: int
    score: float | None


def execute(model: Model, store: Store, policy: Policy, question: Question) -> ExecutedRequest:
    """Link and decode one request under a policy."""
    spec = replace(question.spec, policy=policy)
    linked = link(model, store, spec)
    started = time.perf_counter()
    generated = generate(model, linked.image, spec.max_new_tokens, spec.sampling)
    service_s = linked.timing.ttft_s + time.perf_counter() - started
    return ExecutedRequest(
        linked.timing.ttft_s, service_s, len(generated.tokens), question.score(generated.text.strip())
    )  # fmt: skip
