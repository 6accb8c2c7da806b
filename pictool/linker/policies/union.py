from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pictool.core import Layout, RowMask
from pictool.errors import InputError
from pictool.linker.grid import parse_parts
from pictool.linker.policies.base import (
    Deviation,
    Needs,
    PlotStyle,
    Policy,
    Prompt,
    Selection,
    count_of,
    highest,
    no_rows,
    require_share,
)

if TYPE_CHECKING:
    from pictool.runtime.model import Model


MAX_LENGTH = 1000  # of `parts`


@dataclass(frozen=True)
class Union(Policy):
    """Union (docs/reference/policies.md): the rows of several policies, as `fixup-5+legolink-4`.

    One of them may narrow its rows at layers (CacheBlend). What the others select is among the rows from layer 0 on and
    stays in every layer. Such a union has no shared budget.

    Fields:
        parts: the policies, joined by `+`.
        budget: of the rows of all parts, the ⌈budget·N⌉ that rank highest under any of them (the best of each, then the
            second of each, and so on); 0: all rows.
        spec_model: the second model of the parts that use one.
    """

    name: ClassVar[str] = "union"
    reference: ClassVar[str] = "docs/reference/policies.md"
    plot: ClassVar[PlotStyle] = PlotStyle("D", "Purples")
    parts: str = "fixup-10+legolink-4"
    budget: float = 0.0
    spec_model: str = ""

    def __post_init__(self) -> None:
        require_share(self.name, "budget", self.budget)
        if len(self.parts) > MAX_LENGTH:
            raise InputError(f"union: parts has {len(self.parts)} characters; {MAX_LENGTH} at most")
        parts = parse_parts(self.parts)
        if len(parts) < 2:
            raise InputError(f"union: parts={self.parts!r} must be two policies or more, as in fixup-5+legolink-4")
        for part in parts:
            if part.needs.chain_block:
                raise InputError(f"union: {part.name} reuses no objects of documents, so it goes with no other policy")
            if part.second_model:
                raise InputError("union: name the second model in the field spec_model, not in parts")
        if len({part.needs.sinks for part in parts if part.needs.sinks}) > 1:
            raise InputError(f"union: {self.parts}: the parts need objects with different numbers of dummy tokens")
        narrowing = [part.name for part in parts if _narrows(part)]
        if len(narrowing) > 1:
            raise InputError(
                f"union: {self.parts}: only one part may narrow its rows at layers; give one of them a larger ratio"
            )
        if narrowing and self.budget:
            raise InputError(f"union: {self.parts}: {narrowing[0]} shares no budget: it takes its own share of rows")

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """The parts, with their second model."""
        parts = parse_parts(self.parts)
        return tuple(part.with_default_model(self.spec_model) if self.spec_model else part for part in parts)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.name, *(part.name for part in self.policies)})

    @property
    def needs(self) -> Needs:
        needs = [part.needs for part in self.policies]
        return Needs(
            objects=any(need.objects for need in needs),
            sinks=max(need.sinks for need in needs),
            tables=any(need.tables for need in needs),
            all_tables=any(need.all_tables for need in needs),
            model_field="spec_model" if any(need.model_field for need in needs) else "",
            runs_model=any(need.runs_model for need in needs),
            is_local=all(need.is_local for need in needs) and not self.budget,
        )

    def require_second_model(self, model: Model) -> None:
        for part in self.policies:
            part.require_second_model(model)

    def prepare(self, model: Model) -> None:
        for part in self.policies:
            part.prepare(model)

    def select(self, prompt: Prompt) -> Selection:
        """The rows of all parts. Scores under a budget: the places of the rows, 0 for the best, then -1, -2, …"""
        chosen = [part.select(prompt) for part in self.policies]
        if self.budget:
            rank = np.min([ranks(selection, prompt.layout) for selection in chosen], axis=0)
            return Selection(self._within(rank), -rank.astype(np.float32))
        checked = [part.check_layers(prompt.model.geometry.layers) for part in self.policies]
        static = [selection for selection, layers in zip(chosen, checked, strict=True) if not layers]
        rows, narrows = _joined(chosen), len(static) < len(chosen)
        scores = next((selection.scores for selection in chosen if selection.scores is not None), None)
        return Selection(rows, scores, keep=_joined(static) if narrows else None)

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        return next((part.check_layers(num_layers) for part in self.policies if _narrows(part)), ())

    def narrow(self, prompt: Prompt, layer: int, deviation: Deviation) -> Selection:
        (dynamic,) = (part for part in self.policies if _narrows(part))
        return dynamic.narrow(prompt, layer, deviation)

    def _within(self, rank: NDArray[np.int64]) -> RowMask:
        """Those of the rows with a rank [N] that the budget reaches."""
        return (rank < len(rank)) & highest(-rank.astype(float), count_of(self.budget, len(rank)))


def ranks(selection: Selection, layout: Layout) -> NDArray[np.int64]:
    """The place of every row [N] among those that are selected: 0 for the best; N for a row that is not.

    Without scores, rows at the beginning of their chunk come first.
    """
    rows = selection.rows
    if selection.scores is None:
        scores = -no_rows(layout).astype(float)
        for start, end in (layout.head, *layout.chunks):
            scores[start:end] = -np.arange(end - start)
    else:
        scores = selection.scores[: len(rows)].astype(float)
    order = np.flatnonzero(rows)[np.argsort(-scores[rows], kind="stable")]
    places = np.full(len(rows), len(rows), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places


def _joined(chosen: Sequence[Selection]) -> RowMask:
    rows: RowMask = np.logical_or.reduce([selection.rows for selection in chosen])
    return rows


def _narrows(policy: Policy) -> bool:
    return type(policy).narrow is not Policy.narrow
