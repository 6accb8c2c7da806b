from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pictool.compiler.align import TokenizedParts, map_scores, map_selection, tokenize
from pictool.core import RowMask
from pictool.errors import InputError
from pictool.linker.policies.base import (
    Knob,
    Needs,
    Policy,
    Prompt,
    Scores,
    Selection,
    all_rows,
    count_of,
    highest,
    require_share,
)
from pictool.runtime.model import open_speculative, speculative_name

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class SpecCache(Policy):
    """SpecCache (§2): the tokens with the largest hidden states in the deep layers of a small model.

    Static for the target: everything is chosen before its layer 0, while the first layers are loaded.

    Fields:
        ratio: ρ; the K = ⌈ρN⌉ highest scores of the context are the initial set (eq. 2).
        deep: share of the small model's layers that are scored, from the last one back, rounded up (§2.2: a third).
        tau_smooth: neighbours whose normalised scores differ by this share or more are in different spans (eq. 4).
        tau_cover: a span of which this share is in the initial set is filled in (eq. 6).
        max_span: tokens of a span at most; 1 turns span completion off.
        budget: the final set has at most ⌊budget · K⌋ tokens; the lowest scores go (§2.3).
        spec_model: the small model, a directory or hub name; the embedded model has ``embedded-small``.
    """

    name: ClassVar[str] = "speccache"
    reference: ClassVar[str] = "SpecCache §2"
    knob: ClassVar[Knob | None] = Knob("ratio", is_share=True)
    ratio: float = 0.15
    deep: float = 1 / 3
    tau_smooth: float = 0.4
    tau_cover: float = 0.7
    max_span: int = 16
    budget: float = 1.2
    spec_model: str = ""

    def __post_init__(self) -> None:
        for field in ("ratio", "deep", "tau_cover"):
            require_share(self.name, field, getattr(self, field))
        for field, least in (("tau_smooth", 0), ("max_span", 1), ("budget", 1)):
            if not getattr(self, field) >= least:
                raise InputError(f"speccache: {field}={getattr(self, field)} must be {least} or more")

    @property
    def needs(self) -> Needs:
        return Needs(model_field="spec_model", runs_model=0 < self.ratio < 1)

    def prepare(self, model: Model) -> None:
        if self.needs.runs_model:
            small = self._speculative(model)
            _ = small.stack, small.target

    def select(self, prompt: Prompt) -> Selection:
        if self.ratio == 1:  # nothing to choose; tokens without text would be left out
            return Selection(all_rows(prompt.layout))
        if self.ratio == 0:
            return Selection(~all_rows(prompt.layout))
        small = self._speculative(prompt.model)
        if small.target.tokenizer == prompt.model.target.tokenizer:
            scores = self._scores(small, prompt.layout.tokens)
            return Selection(self.complete(scores[: prompt.layout.num_context]), scores)
        read, target = tokenize(small.tokenizer, prompt.texts), tokenize(prompt.model.tokenizer, prompt.texts)
        if not np.array_equal(target.tokens, prompt.layout.tokens):
            raise InputError("speccache: a document's text does not match its tokens; compile it again")
        scores = self._scores(small, read.tokens)
        return self._across(scores, read, target, prompt)

    def _across(self, scores: Scores, read: TokenizedParts, target: TokenizedParts, prompt: Prompt) -> Selection:
        """The target's rows that overlap what is chosen of the small model's tokens (§2.4, eq. 7)."""
        chosen = np.zeros(len(read.tokens), dtype=bool)
        num_context = read.starts[-1]
        chosen[:num_context] = self.complete(scores[:num_context])
        rows = map_selection(chosen, read, target)[: prompt.layout.num_context]
        return Selection(rows, map_scores(scores, read, target))

    def complete(self, scores: Scores) -> RowMask:
        """The set for scores [N] of the context: initial set, spans filled in, kept to the budget (§2.2, §2.3)."""
        initial_count = count_of(self.ratio, len(scores))
        initial = highest(scores, initial_count)
        chosen = initial.copy()
        for start, end in self.spans(scores):
            if initial[start:end].mean() >= self.tau_cover:
                chosen[start:end] = True
        most = int(self.budget * initial_count + 1e-9)
        if chosen.sum() > most:
            chosen &= highest(np.where(chosen, scores.astype(float), -np.inf), most)
        return chosen

    def spans(self, scores: Scores) -> Iterator[tuple[int, int]]:
        """[start, end) of the locally smooth spans (eq. 3, 4). Equal scores are smooth; a step up from 0 never is."""
        if not len(scores):
            return
        low, wide = float(scores.min()), float(scores.max() - scores.min())
        level = (scores.astype(float) - low) / (wide or 1.0)
        step, base = np.abs(np.diff(level)), level[:-1]
        change = np.divide(step, base, out=np.where(step > 0, np.inf, 0.0), where=base > 0)
        is_cut = (change >= self.tau_smooth) & (change > 0)
        borders = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(scores)]
        for first, last in itertools.pairwise(borders):
            for start in range(first, last, self.max_span):
                yield start, min(start + self.max_span, last)

    def _scores(self, small: Model, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Scores:
        """Mean L2 norm of the hidden states over the deep layers (eq. 1), float32 [m]."""
        from pictool.runtime.activations import hidden_norms

        if len(tokens) > small.max_positions:
            raise InputError(
                f"the prompt has {len(tokens)} tokens for the speculative model {small.name}, which has "
                f"{small.max_positions} positions; choose another with --algo speccache:spec_model=…"
            )
        norms = hidden_norms(small, tokens)
        scores: Scores = norms[-max(1, count_of(self.deep, len(norms))) :].mean(0)
        return scores

    def require_second_model(self, model: Model) -> None:
        if self.needs.runs_model:
            self._second_name(model)

    def _speculative(self, target: Model) -> Model:
        return open_speculative(self._second_name(target), target)

    def _second_name(self, target: Model) -> str:
        name = self.spec_model or speculative_name(target)
        if not name:
            raise InputError(
                f"speccache: needs a small model that reads prompts for {target.name}; choose one with --algo "
                "speccache:spec_model=…"
            )
        return name
