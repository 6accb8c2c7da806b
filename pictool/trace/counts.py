"""What a trace says, counted: per chunk, per layer and per token. Needs no model and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pictool.trace.distributions import log_softmax
from pictool.trace.format import Trace


@dataclass(frozen=True)
class PartCount:
    """The head, a chunk or the tail: [start, end) of the prompt.

    Attributes:
        per_layer: int64 [layers], how many of its tokens were computed at each layer.
        score: mean and highest of the policy's scores, or None if it has none.
    """

    source: str
    start: int
    end: int
    per_layer: NDArray[np.int64]
    score: tuple[float, float] | None

    @property
    def computed(self) -> float:
        """Mean over the layers of the tokens that were computed."""
        return float(self.per_layer.mean())

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class CandidateView:
    """A candidate for the first token of the answer."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class TraceView:
    """A trace, counted.

    Attributes:
        parts: the head, each chunk, the tail.
        layers: int64 [layers], context rows that were computed at each layer.
        depth: int64 [n], at how many layers a token was computed.
        candidates: the likeliest first.
    """

    parts: tuple[PartCount, ...]
    layers: NDArray[np.int64]
    depth: NDArray[np.int64]
    candidates: tuple[CandidateView, ...]


def view_of(trace: Trace) -> TraceView:
    """Count what a trace says."""
    starts = [*trace.layout.starts, trace.layout.num_tokens]
    parts = [_part(trace, source, *span) for source, span in zip(trace.sources, pairwise(starts), strict=True)]
    probabilities = np.exp(log_softmax(trace.logits))
    return TraceView(
        tuple(parts),
        trace.rows[:, : trace.layout.num_context].sum(1),
        trace.rows.sum(0),
        tuple(CandidateView(one.id, one.text, float(probabilities[one.id])) for one in trace.top),
    )


def _part(trace: Trace, source: str, start: int, end: int) -> PartCount:
    score = None
    if trace.scores is not None and start < end:
        of_part = trace.scores[start:end].astype(np.float64)
        score = (float(of_part.mean()), float(of_part.max()))
    return PartCount(source, start, end, trace.rows[:, start:end].sum(1), score)
