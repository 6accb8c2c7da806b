"""What a policy is: which rows of the context are computed, and how that narrows from layer to layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pictool.core import Layout, PromptText, RowMask
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Scores = NDArray[np.float32]


def no_attention(on_host: bool = True) -> Scores:
    """Of an engine that computes no tail before rows are selected."""
    raise NotImplementedError


@dataclass(frozen=True)
class Prompt:
    """What a policy sees: the layout, the texts of head, chunks and tail, and the target model.

    `cached` is, for a policy that reuses chains, how many tokens of the context, from position 0 on, are stored.
    `attention()` is how much the tail attends to each token of the context, over what is stored, for a policy that
    needs it; float32 [N]. With `on_host=False` it may be a tensor on a device, for which the host does not wait.
    """

    model: Model
    layout: Layout
    texts: tuple[str | PromptText, ...]
    cached: int = 0
    attention: Callable[..., Any] = no_attention


@dataclass(frozen=True)
class Ranking:
    """The `count` highest of `scores` go on, of equal ones the first; one score for each row."""

    scores: Any
    count: int


@dataclass(frozen=True)
class Selection:
    """Rows to compute, and why: `scores` are what they were chosen by, if the policy has any.

    With a `ranking`, of the context's tokens, they are those of `rows` that it lets go on: the device says which.
    """

    rows: RowMask  # [N]
    scores: Scores | None = None  # [N] or [n], one per token
    ranking: Ranking | None = None


@dataclass(frozen=True)
class Deviation:
    """How far fresh K and V are from the cached ones at a checked layer: squared L2 over KV heads and dims.

    `rows` are the context rows that have fresh ones and may be left; the others have deviation 0.
    """

    rows: RowMask  # [N]
    key: Scores  # [N]
    value: Scores  # [N]


@dataclass(frozen=True)
class Needs:
    """What a policy needs beside the prompt and the target model. A policy declares it; nobody asks its name or type.

    Fields:
        objects: it reuses the KV of compiled chunks, so that texts are compiled for it.
        chain_block: it reuses the stored beginning of the prompt in place of objects, in blocks of so many tokens, and
            stores what it computes; 0: it does not.
        model_field: the field that names a second model, which reads the prompt; empty if it uses none.
        runs_model: `select` runs that model, which takes long.
        attention: `select` calls `Prompt.attention`, so objects are loaded before rows are selected.
        is_local: whether a row is computed depends on nothing after it, so that an answer's KV is that of the next
            prompt which begins with both (docs/design.md §2, rule 12).
        cut: it computes so many first tokens of a chunk, and no others: states of linear layers are reused from there
            on; None: it computes rows anywhere, which no link of a hybrid can (`linker/cuts.py`).
    """

    objects: bool = True
    chain_block: int = 0
    model_field: str = ""
    runs_model: bool = False
    attention: bool = False
    is_local: bool = False
    cut: int | None = None

    @property
    def selects_late(self) -> bool:
        """Whether rows are selected once objects are open: it reads from them, or is slow, so that loading overlaps."""
        return self.runs_model or self.attention or self.chain_block > 0


@dataclass(frozen=True)
class Knob:
    """The field that sets what a policy costs: a larger value computes more rows, and is closer to full recompute.

    Policies that differ in it alone are one family: `pic tune` searches along it, `NAME-NUMBER` sets it, and labels
    show it.

    Fields:
        field: its name. is_share: a share of rows, in per cent where it stands in a label; else a whole number.
    """

    field: str
    is_share: bool = False

    def text(self, value: float) -> str:
        """The number in NAME-NUMBER."""
        return f"{value * 100:.10g}" if self.is_share else str(value)

    def parse(self, number: str) -> float:
        """The value of NUMBER. Raises ValueError."""
        return float(number) / 100 if self.is_share else int(number)


@dataclass(frozen=True)
class Policy(ABC):
    """One linking algorithm; its fields are its hyperparameters. The tail is computed in full by every policy."""

    name: ClassVar[str]
    reference: ClassVar[str]  # paper and section
    knob: ClassVar[Knob | None] = None

    @property
    def params(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def second_model(self) -> str:
        """The name of the second model, as its field has it; empty if there is none, or a default is taken."""
        return str(getattr(self, self.needs.model_field)) if self.needs.model_field else ""

    def with_default_model(self, name: str) -> Policy:
        """The same policy with this second model, if it uses one and names none."""
        field = self.needs.model_field
        return replace(self, **{field: name}) if field and not self.second_model else self

    def require_second_model(self, model: Model) -> None:  # noqa: B027 (most policies need none)
        """Raise InputError if a second model is needed, none is named, and none is known for this one."""

    @property
    def fallback(self) -> Policy | None:
        """What takes its place on an engine or a model that cannot link it; None: it is refused there."""
        return None

    @property
    def without_attention(self) -> Policy:
        """Itself, or what takes its place where no attention is shown."""
        return self.fallback or self if self.needs.attention else self

    def prepare(self, model: Model) -> None:  # noqa: B027 (most policies need nothing)
        """Load the second model; called before a link's clock starts."""

    @abstractmethod
    def select(self, prompt: Prompt) -> Selection:
        """Static: before layer 0, the rows of head and chunks that are computed."""

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        """Dynamic: the layers at which `narrow` is called. A static policy has none."""
        return ()

    def narrow(self, prompt: Prompt, layer: int, deviation: Deviation) -> Selection:
        """Dynamic: which of `deviation.rows` go on, at this layer and the next ones; by default those of `rank`."""
        ranking = self.rank(prompt, layer, deviation.key, deviation.value)
        assert ranking is not None, f"{self.name} checks no layer"
        eligible = np.where(deviation.rows, ranking.scores, -np.inf)
        return Selection(highest(eligible, ranking.count) & deviation.rows, ranking.scores)

    def rank(self, prompt: Prompt, layer: int, key: Any, value: Any) -> Ranking | None:
        """Dynamic: by how far K and V of rows are from the cached ones, which of them go on. None: `narrow` says it.

        They are tensors where a device computes them: the host does not wait for it then.
        """
        return None


def no_rows(layout: Layout) -> RowMask:
    return np.zeros(layout.num_context, dtype=bool)


def all_rows(layout: Layout) -> RowMask:
    return np.ones(layout.num_context, dtype=bool)


def reused_chunks(layout: Layout) -> tuple[tuple[int, int], ...]:
    """All chunks but the head; with an empty head the first chunk is the head."""
    return layout.chunks if layout.head[1] > 0 else layout.chunks[1:]


def reused_rows(layout: Layout) -> RowMask:
    """The rows of the chunks that `reused_chunks` has."""
    rows, chunks = no_rows(layout), reused_chunks(layout)
    if chunks:
        rows[chunks[0][0] :] = True
    return rows


def first_rows(layout: Layout, k: int) -> RowMask:
    """The first min(k, n_c) tokens of every chunk but the head; with an empty head the first chunk is the head."""
    rows = no_rows(layout)
    for start, end in reused_chunks(layout):
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
