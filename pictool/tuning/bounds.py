"""What a sample says about a mean, at any time: bets against it (betting §4).

The KL of questions is 0 for most and some nats for a few. A bootstrap of a sample without one of the few says that the
mean is 0; Student's t needs a normal mean. What is used here needs the range of the values and nothing else: whoever
bets against "the mean is m or more" at odds that are fair if it is m multiplies a capital of 1 beyond 1 / level with a
probability of `level` at most, however often he looks (Ville's inequality). So a search may look after every round and
stop where the answer is clear. The capital is the mean over several bets, so it does not depend on the order of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating[Any]]
# Shares of the capital that are bet, and how much of the capital goes to each: most to the bet that a sample of hardly
# anything but zeros wins.
_BETS = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.8, 0.97])
_WEIGHTS = np.array([0.06, 0.06, 0.06, 0.06, 0.08, 0.08, 0.2, 0.4])
_STEPS = 40  # of bisection


def log_capital_below(values: Values, mean: float, low: float, high: float) -> float:
    """The logarithm of what was won by bets that the mean is below `mean`.

    Args:
        values: [n], from `low` to `high`. mean: within these.
    """
    scaled, at = _scaled(values, mean, low, high)
    if at >= 1:
        return np.inf  # the mean cannot be above
    return _log_mean(-(scaled - at) / (1 - at))


def log_capital_above(values: Values, mean: float, low: float, high: float) -> float:
    """The logarithm of what was won by bets that the mean is above `mean`; see `log_capital_below`."""
    return log_capital_below(-np.asarray(values), -mean, -high, -low)


def upper_bound(values: Values, level: float, low: float, high: float) -> float:
    """What the mean is below, but for a probability of `level`, at whatever time one looks."""
    least, most = float(np.mean(values)) if len(values) else low, high
    for _ in range(_STEPS):
        middle = (least + most) / 2
        if log_capital_below(values, middle, low, high) >= -np.log(level):
            most = middle
        else:
            least = middle
    return most


def lower_bound(values: Values, level: float, low: float, high: float) -> float:
    """What the mean is above, but for a probability of `level`, at whatever time one looks."""
    return -upper_bound(-np.asarray(values), level, -high, -low)


def _scaled(values: Values, mean: float, low: float, high: float) -> tuple[Values, float]:
    scaled = (np.asarray(values, dtype=float) - low) / (high - low)
    assert len(scaled) == 0 or (scaled.min() >= -1e-9 and scaled.max() <= 1 + 1e-9), "values beyond their range"
    return scaled, (mean - low) / (high - low)


def _log_mean(gains: Values) -> float:
    """The logarithm of the weighted mean of the capital over all bets; `gains` [n] are -1 or more."""
    capitals = np.log1p(_BETS[:, None] * gains[None, :]).sum(1) + np.log(_WEIGHTS)
    highest = capitals.max()
    return float(highest + np.log(np.exp(capitals - highest).sum()))
