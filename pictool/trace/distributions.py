"""From logits to log-probabilities, and how far two such distributions are apart. Numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of logits [vocab], in double precision."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """KL(p ‖ q) in nats of two log-probabilities [vocab]."""
    return max(0.0, float((np.exp(p) * (p - q)).sum()))
