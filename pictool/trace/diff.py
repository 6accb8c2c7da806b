"""Compare two traces of one prompt: overlap of the selected rows, where the answers part, how the logits differ.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from pictool.core import RowMask
from pictool.errors import TraceError
from pictool.trace.counts import log_softmax
from pictool.trace.format import GeneratedToken, Trace


@dataclass(frozen=True)
class SelectionDiff:
    """Which context rows two links computed.

    Attributes:
        jaccard: float64 [layers], the overlap |A ∩ B| / |A ∪ B| at each layer; 1 where neither link computed a row.
        overall: the same overlap of all (layer, token) pairs together.
        both, only_a, only_b: bool [N], tokens that both links, or only one of them, computed at some layer.
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
        candidates: those of either link, by the higher of their two probabilities.
        common: how many generated tokens are equal, from the first one on. parting: the next token of each link, or
            None where its answer ends.
        same_answer: whether the texts are equal.
        other_objects: the chunks (from 0) that were linked from different objects, as after another context.
    """

    selection: SelectionDiff
    kl: tuple[float, float]
    max_logit: float
    candidates: tuple[CandidateDiff, ...]
    common: int
    parting: tuple[GeneratedToken | None, GeneratedToken | None]
    same_answer: bool
    other_objects: tuple[int, ...]


def diff_traces(a: Trace, b: Trace, names: tuple[str, str] = ("A", "B")) -> TraceDiff:
    """Compare two traces; `names` are for messages.

    Raises:
        TraceError: traces of different prompts or models.
    """
    _require_comparable(a, b, names)
    num_context = a.layout.num_context
    p, q = log_softmax(a.logits), log_softmax(b.logits)
    common = _count_common(a, b)
    pairs = zip(a.chunks, b.chunks, strict=True)
    return TraceDiff(
        selection=diff_selections(a.rows[:, :num_context], b.rows[:, :num_context]),
        kl=(kl_divergence(p, q), kl_divergence(q, p)),
        max_logit=float(np.abs(a.logits.astype(np.float64) - b.logits).max()),
        candidates=_diff_candidates(a, b, p, q),
        common=common,
        parting=(_generated_at(a, common), _generated_at(b, common)),
        same_answer=a.answer == b.answer,
        other_objects=tuple(index for index, (chunk_a, chunk_b) in enumerate(pairs) if chunk_a.key != chunk_b.key),
    )


def diff_selections(a: RowMask, b: RowMask) -> SelectionDiff:
    """Compare two selections, bool [layers, N] each."""
    by_layer = [jaccard(layer_a, layer_b) for layer_a, layer_b in zip(a, b, strict=True)]
    any_a, any_b = np.asarray(a.any(0)), np.asarray(b.any(0))
    return SelectionDiff(np.asarray(by_layer), jaccard(a, b), any_a & any_b, any_a & ~any_b, any_b & ~any_a)


def jaccard(a: RowMask, b: RowMask) -> float:
    """Return the Jaccard similarity of two masks of one shape; 1 if both are empty."""
    union = int((a | b).sum())
    return float((a & b).sum() / union) if union else 1.0


def kl_divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return KL(p ‖ q) in nats; p and q are log-probabilities [vocab]."""
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


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


def _count_common(a: Trace, b: Trace) -> int:
    pairs = zip_longest(a.generated, b.generated)
    return next((i for i, (x, y) in enumerate(pairs) if x is None or y is None or x.id != y.id), len(a.generated))


def _generated_at(trace: Trace, index: int) -> GeneratedToken | None:
    return trace.generated[index] if index < len(trace.generated) else None


def _diff_candidates(a: Trace, b: Trace, p: NDArray[np.float64], q: NDArray[np.float64]) -> tuple[CandidateDiff, ...]:
    texts = {token.id: token.text for token in (*a.top, *b.top)}
    candidates = [
        CandidateDiff(i, text, (float(a.logits[i]), float(b.logits[i])), (float(np.exp(p[i])), float(np.exp(q[i]))))
        for i, text in texts.items()
    ]
    return tuple(sorted(candidates, key=lambda candidate: -max(candidate.probabilities)))
