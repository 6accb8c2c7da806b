"""Which users send requests together: so many, or as many as fill a share of the device's memory (EPIC's CCR)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.bench.users import RandomWorkload, User, added_bytes, kv_bytes
from pictool.bench.workload import require_disk
from pictool.controller.calibration import token_bytes
from pictool.errors import InputError
from pictool.runtime.machine import memory_bytes

if TYPE_CHECKING:
    from pictool.runtime.model import Model


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
class Wanted:
    """How many users: numbers, or else context cache ratios: bytes of their objects by `memory` (the device's)."""

    counts: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    memory: int | None = None

    def __post_init__(self) -> None:
        for option, least in (("users", self.counts), ("ccr", self.ratios), ("memory", (self.memory,))):
            if wrong := [value for value in least if value is not None and not 0 < value < float("inf")]:
                raise InputError(f"--{option} {wrong[0]:g}: must be above 0")

    def choose(self, memory: int | None, sizes: Iterable[int], what: str) -> list[int]:
        """Numbers of users, ascending, where each user adds objects of the next of `sizes` bytes.

        Raises:
            InputError: the memory is unknown, or there are too few users (`what` says of what).
        """
        if not self.ratios:
            return sorted(set(self.counts))
        if memory is None:
            raise InputError("--ccr: this system does not tell how much memory it has; say it with --memory")
        chosen = set()
        for ratio in self.ratios:
            count = count_for(ratio * memory, sizes)
            if count is None:
                raise InputError(f"--ccr {ratio:g}: {what} fill less of {memory:,} bytes; use less, or less --memory")
            chosen.add(count)
        return sorted(chosen)


def random_sets(model: Model, workload: RandomWorkload, wanted: Wanted, seed: int, directory: Path) -> list[UserSet]:
    """User sets of random documents; the users of one are the first of the next.

    Raises:
        InputError: prompts that the model cannot take, unknown memory, or objects that do not fit into `directory`.
    """
    workload.require_fit(model)
    memory = wanted.memory or device_memory(model)
    each = workload.context * token_bytes(model)
    most = [count * each for count in wanted.counts] + [ratio * memory for ratio in wanted.ratios if memory]
    require_disk(directory, int(max(most, default=0)))
    counts = wanted.choose(memory, itertools.repeat(each), "random users")
    return make_sets(model, workload.users(model, counts[-1], seed), counts, memory)


def dataset_sets(model: Model, users: Sequence[User], wanted: Wanted, name: str) -> list[UserSet]:
    """The same of the first users of a dataset, which is called `name`.

    Raises:
        InputError: there are not so many, or unknown memory.
    """
    memory = wanted.memory or device_memory(model)
    counts = wanted.choose(memory, list(added_bytes(model, users)), f"the {len(users)} document sets of {name}")
    if counts[-1] > len(users):
        raise InputError(f"--users {counts[-1]}: {name} has {len(users)} document sets, one for each user")
    return make_sets(model, users, counts, memory)


def make_sets(model: Model, users: Sequence[User], counts: Iterable[int], memory: int | None) -> list[UserSet]:
    """The first users, so many of them, for every count."""
    found = []
    for count in sorted(set(counts)):
        num_bytes = kv_bytes(model, users[:count])
        found.append(UserSet(tuple(users[:count]), num_bytes, num_bytes / memory if memory else None))
    return found


def count_for(target: float, sizes: Iterable[int]) -> int | None:
    """How many objects of these bytes come nearest to `target` bytes, at least one; None if all are too few."""
    held, count, size = 0, 0, 0
    for size in sizes:
        if count and held + size / 2 > target:
            return count
        held, count = held + size, count + 1
    return count if count and held + size / 2 > target else None


def device_memory(model: Model) -> int | None:
    """Bytes of memory of the device on which the model runs."""
    if model.device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(model.device).total_memory)
    return memory_bytes()
