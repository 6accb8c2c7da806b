"""Count what one trace says: computed tokens per part and layer, and probabilities of the first token. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pictool.trace.format import Trace


@dataclass(frozen=True)
class PartCounts:
    """Counts of the head, of one chunk or of the tail, which is [start, end) of the prompt.

    Attributes:
        per_layer: int64 [layers], how many of its tokens were computed at each layer.
        score: mean and maximum of the policy's scores, or None if it has none.
    """

    source: str
    start: int
    end: int
    per_layer: NDArray[np.int64]
    score: tuple[float, float] | None

    @property
    def computed(self) -> float:
        """Computed tokens, the mean over the layers."""
        return float(self.per_layer.mean())

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class CandidateProbability:
    """A candidate for the first token of the answer."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class TraceCounts:
    """The counts of a trace.

    Attributes:
        parts: of the head, each chunk and the tail.
        rows_per_layer: int64 [layers], computed context tokens at each layer.
        layers_per_token: int64 [n], at how many layers each token was computed.
        candidates: the likeliest first.
    """

    parts: tuple[PartCounts, ...]
    rows_per_layer: NDArray[np.int64]
    layers_per_token: NDArray[np.int64]
    candidates: tuple[CandidateProbability, ...]


def count_rows(trace: Trace) -> TraceCounts:
    """Count the computed rows of a trace per part, per layer and per token."""
    starts = [*trace.layout.starts, trace.layout.num_tokens]
    parts = [_count_part(trace, source, *span) for source, span in zip(trace.sources, pairwise(starts), strict=True)]
    probabilities = np.exp(log_softmax(trace.logits))
    return TraceCounts(
        parts=tuple(parts),
        rows_per_layer=trace.rows[:, : trace.layout.num_context].sum(1),
        layers_per_token=trace.rows.sum(0),
        candidates=tuple(
            CandidateProbability(token.id, token.text, float(probabilities[token.id])) for token in trace.top
        ),
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the log-probabilities of logits [vocab], in double precision."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _count_part(trace: Trace, source: str, start: int, end: int) -> PartCounts:
    score = None
    if trace.scores is not None and start < end:
        part_scores = trace.scores[start:end].astype(np.float64)
        score = (float(part_scores.mean()), float(part_scores.max()))
    return PartCounts(source, start, end, trace.rows[:, start:end].sum(1), score)
