"""What a policy is: which rows of the context are computed, and how that narrows from layer to layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pictool.core import Layout, RowMask
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Scores = NDArray[np.float32]
Table = NDArray[np.float16]


@dataclass(frozen=True)
class Prompt:
    """What a policy may look at: where everything stands, the texts of head, chunks and tail, and the target model.

    `tables` has, if the policy `uses_tables`, every chunk's table of fixups [n_c], or None for an object without one.
    `cached` is, if the policy has `chain_block`, how many tokens of the context, from position 0 on, are stored.
    """

    model: Model
    layout: Layout
    texts: tuple[str, ...]
    tables: tuple[Table | None, ...] = ()
    cached: int = 0


@dataclass(frozen=True)
class Selection:
    """Rows to compute, and why: `scores` are what they were chosen by, if the policy has any."""

    rows: RowMask  # [N]
    scores: Scores | None = None  # [N] or [n], one per token


@dataclass(frozen=True)
class Deviation:
    """How far fresh K and V are from the cached ones at a checked layer: squared L2 over KV heads and dims.

    `rows` says of which context rows there are fresh ones; the others have deviation 0.
    """

    rows: RowMask  # [N]
    key: Scores  # [N]
    value: Scores  # [N]


@dataclass(frozen=True)
class Policy(ABC):
    """One linking algorithm; its fields are its hyperparameters. The tail is computed in full by every policy."""

    name: ClassVar[str]
    reference: ClassVar[str]  # paper and section
    default_sinks: ClassVar[int] = 0  # how it wants its documents compiled

    @property
    def params(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sinks(self) -> int:
        """Dummy tokens in front of documents that are compiled for this policy."""
        return self.default_sinks

    @property
    def is_slow(self) -> bool:
        """Whether `select` runs a model; the first layers are loaded meanwhile."""
        return False

    @property
    def uses_tables(self) -> bool:
        """Whether `select` reads the objects' tables of fixups; texts that are compiled for this policy get them."""
        return False

    @property
    def chain_block(self) -> int:
        """Tokens of a block, if this policy reuses (and stores) prefix chains in place of objects; else 0."""
        return 0

    def prepare(self, model: Model) -> None:  # noqa: B027 (most policies need nothing)
        """Load what the policy needs beside the target model; called before a link's clock starts."""

    @abstractmethod
    def select(self, prompt: Prompt) -> Selection:
        """Static: before layer 0, the rows of head and chunks that are computed."""

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        """Dynamic: the layers at which `narrow` is asked. A static policy has none."""
        return ()

    def narrow(self, prompt: Prompt, layer: int, deviation: Deviation) -> Selection:
        """Dynamic: which of `deviation.rows` go on, at this layer and the next ones."""
        raise NotImplementedError(f"{self.name} checks no layer")


def no_rows(layout: Layout) -> RowMask:
    return np.zeros(layout.num_context, dtype=bool)


def all_rows(layout: Layout) -> RowMask:
    return np.ones(layout.num_context, dtype=bool)


def first_rows(layout: Layout, k: int) -> RowMask:
    """The first min(k, n_c) tokens of every chunk but the head; with an empty head the first chunk is the head."""
    rows = no_rows(layout)
    chunks = layout.chunks if layout.head[1] > 0 else layout.chunks[1:]
    for start, end in chunks:
        rows[start : min(start + k, end)] = True
    return rows


def count_of(ratio: float, total: int) -> int:
    """⌈ratio · total⌉, without what floating point adds to whole products (0.07 · 100)."""
    return math.ceil(ratio * total - 1e-9)


def highest(scores: NDArray[np.floating[Any]], count: int) -> RowMask:
    """bool like `scores`, True for the `count` highest; of equal ones the first."""
    chosen = np.zeros(len(scores), dtype=bool)
    chosen[np.argsort(-scores, kind="stable")[:count]] = True
    return chosen


def require_share(policy: str, field: str, value: float) -> None:
    """Refuse what is no share.

    Raises:
        InputError: below 0, above 1, or not a number.
    """
    if not 0 <= value <= 1:
        raise InputError(f"{policy}: {field}={value} must be from 0 to 1")
