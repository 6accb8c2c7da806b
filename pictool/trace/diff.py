"""Two traces of one prompt: where the selections overlap, where the answers part, how the logits differ. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from pictool.core import RowMask
from pictool.errors import TraceError
from pictool.trace.distributions import divergence, log_softmax
from pictool.trace.format import Trace, TracedToken


@dataclass(frozen=True)
class SelectionDiff:
    """Which context rows two links computed.

    Attributes:
        jaccard: float64 [layers]. |A ∩ B| / |A ∪ B| of the rows computed at each layer; 1 where neither computed any.
        overall: the same of all (layer, token) pairs together.
        both, only_a, only_b: bool [N]. Tokens that were computed at some layer by both, by one alone.
    """

    jaccard: NDArray[np.float64]
    overall: float
    both: RowMask
    only_a: RowMask
    only_b: RowMask


@dataclass(frozen=True)
class CandidateDiff:
    """A candidate of either link for the first token, with its logits and probabilities."""

    id: int
    text: str
    logits: tuple[float, float]
    probabilities: tuple[float, float]


@dataclass(frozen=True)
class TraceDiff:
    """Two links of one prompt, a and b.

    Attributes:
        kl: KL(a ‖ b) and KL(b ‖ a) of the first token, in nats. max_logit: the largest difference of two logits.
        candidates: those of either, by the higher of their probabilities.
        common: how many generated tokens are the same, from the first on. parting: what comes then; None at the end.
        same_answer: whether the texts are equal.
        other_objects: the chunks (from 0) that were linked from different objects, as with other sinks.
    """

    selection: SelectionDiff
    kl: tuple[float, float]
    max_logit: float
    candidates: tuple[CandidateDiff, ...]
    common: int
    parting: tuple[TracedToken | None, TracedToken | None]
    same_answer: bool
    other_objects: tuple[int, ...]


def diff_traces(a: Trace, b: Trace, names: tuple[str, str] = ("A", "B")) -> TraceDiff:
    """Compare two traces.

    Raises:
        TraceError: traces of different prompts or models.
    """
    _require_comparable(a, b, names)
    num_context = a.layout.num_context
    selection = diff_selections(a.rows[:, :num_context], b.rows[:, :num_context])
    p, q = log_softmax(a.logits), log_softmax(b.logits)
    common = _common(a, b)
    others = (i for i, (one, two) in enumerate(zip(a.chunks, b.chunks, strict=True)) if one.key != two.key)
    return TraceDiff(
        selection=selection,
        kl=(divergence(p, q), divergence(q, p)),
        max_logit=float(np.abs(a.logits.astype(np.float64) - b.logits).max()),
        candidates=_candidates(a, b, p, q),
        common=common,
        parting=(_at(a, common), _at(b, common)),
        same_answer=a.answer == b.answer,
        other_objects=tuple(others),
    )


def diff_selections(a: RowMask, b: RowMask) -> SelectionDiff:
    """Overlap of two selections, bool [layers, N] each."""
    each = [_jaccard(*pair) for pair in zip(a, b, strict=True)]
    any_a, any_b = np.asarray(a.any(0)), np.asarray(b.any(0))
    return SelectionDiff(np.asarray(each), _jaccard(a, b), any_a & any_b, any_a & ~any_b, any_b & ~any_a)


def _jaccard(a: RowMask, b: RowMask) -> float:
    either = int((a | b).sum())
    return float((a & b).sum() / either) if either else 1.0


def _require_comparable(a: Trace, b: Trace, names: tuple[str, str]) -> None:
    if a.target != b.target:
        raise TraceError(
            f"{names[0]} and {names[1]}: links of different models ({a.report['model']} {a.target.model[:12]} "
            f"{a.target.dtype}, {b.report['model']} {b.target.model[:12]} {b.target.dtype}) cannot be compared"
        )
    same_tokens = np.array_equal(a.layout.tokens, b.layout.tokens) and a.layout.starts == b.layout.starts
    if not same_tokens or a.logits.shape != b.logits.shape:
        raise TraceError(
            f"{names[0]} and {names[1]}: links of different prompts ({a.layout.num_tokens} and {b.layout.num_tokens} "
            "tokens) cannot be compared; link the same documents and query"
        )


def _common(a: Trace, b: Trace) -> int:
    pairs = zip_longest(a.generated, b.generated)
    return next((i for i, (x, y) in enumerate(pairs) if x is None or y is None or x.id != y.id), len(a.generated))


def _at(trace: Trace, index: int) -> TracedToken | None:
    return trace.generated[index] if index < len(trace.generated) else None


def _candidates(a: Trace, b: Trace, p: NDArray[np.float64], q: NDArray[np.float64]) -> tuple[CandidateDiff, ...]:
    texts = {one.id: one.text for one in (*a.top, *b.top)}
    found = [
        CandidateDiff(i, text, (float(a.logits[i]), float(b.logits[i])), (float(np.exp(p[i])), float(np.exp(q[i]))))
        for i, text in texts.items()
    ]
    return tuple(sorted(found, key=lambda one: -max(one.probabilities)))
