"""Which rows of one prompt are still computed, and how a policy narrows them at a checked layer. All engines use it."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool.core import RowMask
from pictool.linker.policies.base import Deviation, Policy, Prompt, Ranking, Scores, Selection
from pictool.runtime.tensors import to_device


class Narrowing:
    """The rows of a link from layer to layer.

    Rows are those of `always` [n]; of scores that reach further the beginning is kept. Those of `never` [n] are exact
    already.

    Attributes:
        prompt, policy, always: of the link.
        on: bool [n], the rows that are computed from here on; with a `ranking`, those of which it lets some go on.
        scores: float32 [n], what the policy chose by, or None; 0 where it has none.
    """

    def __init__(
        self, prompt: Prompt, policy: Policy, selection: Selection, always: RowMask, never: RowMask | None = None
    ) -> None:
        self._never = never
        self.prompt, self.policy, self.always, self.ranking = prompt, policy, always, selection.ranking
        self.scores: Scores | None = None
        self.on = self._take(selection)

    def narrow(self, layer: int, key: Scores, value: Scores) -> NDArray[np.int64]:
        """Let the policy narrow the rows, by how far their fresh K and V, [on], are from the cached ones.

        Returns:
            which of these rows stay on.
        """
        num_context = self.prompt.layout.num_context
        of_key, of_value = (np.zeros(len(self.on), dtype=np.float32) for _ in (key, value))
        of_key[self.on], of_value[self.on] = key, value
        of_key[self.always], of_value[self.always] = 0, 0
        on = self.on & ~self.always
        deviation = Deviation(on[:num_context], of_key[:num_context], of_value[:num_context])
        narrowed = self._take(self.policy.narrow(self.prompt, layer, deviation))
        assert not (narrowed & ~self.on).any(), f"{self.policy.name} selects rows that it has left"
        stay = np.flatnonzero(narrowed[self.on])
        self.on = narrowed
        return stay

    def _take(self, selection: Selection) -> RowMask:
        """The rows [n] that go on, with those that always do; scores stay as the policy first gave them."""
        rows = self.always.copy()
        rows[: len(selection.rows)] |= selection.rows
        if self._never is not None:
            rows &= ~self._never
        if selection.scores is not None and self.scores is None:
            self.scores = np.zeros(len(rows), dtype=np.float32)
            self.scores[: len(selection.scores)] = selection.scores[: len(rows)]
        return rows


class RankedRows:
    """The rows of one prompt from layer to layer, where the device ranks them and the host only knows how many go on.

    Attributes:
        positions: int64 [rows] on the device, ascending: those that are computed from here on.
        scores: float32 [n] on the device, what the policy chose by at first; 0 where it has none.
    """

    def __init__(self, narrowing: Narrowing, first: Ranking, device: torch.device) -> None:
        at = np.flatnonzero(narrowing.on)
        is_fixed = narrowing.always[at]
        self._num_fixed = int(is_fixed.sum())
        self.positions, self._is_fixed = to_device(at, device), to_device(is_fixed, device)
        self.scores: Tensor = first.scores.new_zeros(len(narrowing.on))
        self.scores[self.positions] = first.scores.masked_fill(self._is_fixed, 0)

    def narrow(self, ranking: Ranking) -> Tensor:
        """Which of the rows stay on, int64: those that always do, and the highest of the others."""
        order = ranking.scores.masked_fill(self._is_fixed, math.inf).sort(descending=True, stable=True).indices
        stay: Tensor = order[: self._num_fixed + ranking.count].sort().values
        self.positions, self._is_fixed = self.positions[stay], self._is_fixed[stay]
        return stay
