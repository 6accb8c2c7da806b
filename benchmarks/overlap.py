"""Overlap of the tokens that two scorings select: Jaccard similarity of the highest scores (SpecCache §1, fig. 3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.core import RowMask
from pictool.errors import InputError
from pictool.linker.policies.base import count_of, highest
from pictool.trace.diff import jaccard

TokenScores = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]

SHARE = 0.2  # of the tokens that are selected, as in fig. 3


@dataclass(frozen=True)
class LayerOverlap:
    """Overlap of the tokens that the layers of one model select: the shallow-deep baseline of fig. 3.

    Attributes:
        share: the share of the tokens that each layer selects, those with the highest scores.
        first: float64 [layers - 1], Jaccard similarity of layer 0's selection and that of each deeper layer.
        neighbours: float64 [layers - 1], Jaccard similarity of the selections of the layers i and i + 1.
        chance: the mean similarity of two random selections of this size.
    """

    share: float
    first: NDArray[np.float64]
    neighbours: NDArray[np.float64]
    chance: float


@dataclass(frozen=True)
class ModelOverlap:
    """Overlap of the tokens that two models select (fig. 3, Spec ↔ Target).

    Attributes:
        share: the share of the tokens that each model selects, those with the highest scores.
        jaccard: |A ∩ B| / |A ∪ B| of the two selections.
        chance: the mean similarity of two random selections of this size.
    """

    share: float
    jaccard: float
    chance: float


def top_share(scores: TokenScores, share: float = SHARE) -> RowMask:
    """Select the ⌈share · n⌉ tokens with the highest scores [n], bool [n]; of equal scores the earlier token's.

    Raises:
        InputError: no scores, scores that are not numbers, or a share outside (0, 1].
    """
    if scores.ndim != 1 or not len(scores):
        raise InputError(f"scores have shape {scores.shape}: must be one per token, and of one token at least")
    if np.isnan(scores).any():
        raise InputError("scores must be numbers, but some are nan")
    return highest(scores.astype(np.float64), _count(len(scores), share))


def top_share_overlap(a: TokenScores, b: TokenScores, share: float = SHARE) -> float:
    """Compute the Jaccard similarity of what two scorings [n] of the same tokens select (see `top_share`).

    Raises:
        InputError: scorings of different numbers of tokens, or see `top_share`.
    """
    if a.shape != b.shape:
        raise InputError(f"scores of {a.shape} and {b.shape} tokens are not of the same tokens")
    return jaccard(top_share(a, share), top_share(b, share))


def layer_overlap(norms: TokenScores, share: float = SHARE) -> LayerOverlap:
    """Compare the selections of the layers, by scores [layers, n]: with layer 0's, and of neighbouring layers.

    The scores may be hidden-state norms, which are the paper's importance, or a deviation.

    Raises:
        InputError: scores of another shape, or see `top_share`.
    """
    if norms.ndim != 2 or not len(norms):
        raise InputError(f"scores have shape {norms.shape}: must be [layers, tokens]")
    selections = [top_share(layer, share) for layer in norms]
    first = [jaccard(selections[0], deeper) for deeper in selections[1:]]
    neighbours = [jaccard(upper, lower) for upper, lower in itertools.pairwise(selections)]
    return LayerOverlap(share, _array(first), _array(neighbours), chance_overlap(norms.shape[1], share))


def model_overlap(speculative_scores: TokenScores, target_scores: TokenScores, share: float = SHARE) -> ModelOverlap:
    """Compare the selections of a speculative model and its target, by scores [n] of the same tokens.

    Map the scores of another tokenizer's tokens to the target's tokens first (SpecCache §2.4).

    Raises:
        InputError: see `top_share_overlap`.
    """
    similarity = top_share_overlap(speculative_scores, target_scores, share)
    return ModelOverlap(share, similarity, chance_overlap(len(target_scores), share))


def chance_overlap(num_tokens: int, share: float = SHARE) -> float:
    """Compute the mean Jaccard similarity of two random selections of ⌈share · n⌉ out of n tokens.

    Raises:
        InputError: no tokens, or a share outside (0, 1].
    """
    from scipy.stats import hypergeom

    if num_tokens < 1:
        raise InputError(f"{num_tokens} tokens: there must be one at least")
    count = _count(num_tokens, share)
    common = np.arange(count + 1)
    return float((hypergeom.pmf(common, num_tokens, count, count) * common / (2 * count - common)).sum())


def _count(num_tokens: int, share: float) -> int:
    if not 0 < share <= 1:
        raise InputError(f"share {share}: must be above 0 and at most 1")
    return max(1, count_of(share, num_tokens))


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
