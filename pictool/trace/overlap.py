"""Whether two scorings choose the same tokens: Jaccard overlap of the highest (SpecCache §1, fig. 3)."""

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

Scored = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]

SHARE = 0.2  # of the tokens that are compared, in fig. 3


@dataclass(frozen=True)
class LayerOverlap:
    """Overlap of the tokens that the layers of one model choose: fig. 3's shallow-deep baseline.

    Attributes:
        share: the share of the tokens that each layer chooses, those with the highest scores.
        first: float64 [layers - 1]. Jaccard similarity of layer 0's choice and that of each deeper layer.
        neighbours: float64 [layers - 1]. That of the choices of the layers i and i + 1.
        chance: what two random choices of this size have on average.
    """

    share: float
    first: NDArray[np.float64]
    neighbours: NDArray[np.float64]
    chance: float


@dataclass(frozen=True)
class ModelOverlap:
    """Overlap of the tokens that two models choose (fig. 3, Spec ↔ Target).

    Attributes:
        share: the share of the tokens that each model chooses, those with the highest scores.
        jaccard: |A ∩ B| / |A ∪ B| of the two choices.
        chance: what two random choices of this size have on average.
    """

    share: float
    jaccard: float
    chance: float


def top_share(scores: Scored, share: float = SHARE) -> RowMask:
    """The ⌈share · n⌉ tokens with the highest scores [n], bool [n]; of equal scores the earlier token's is higher.

    Raises:
        InputError: no scores, scores that are not numbers, or a share outside (0, 1].
    """
    if scores.ndim != 1 or not len(scores):
        raise InputError(f"scores have shape {scores.shape}: must be one per token, and of one token at least")
    if np.isnan(scores).any():
        raise InputError("scores must be numbers, but some are nan")
    return highest(scores.astype(np.float64), _count(len(scores), share))


def top_share_overlap(a: Scored, b: Scored, share: float = SHARE) -> float:
    """Jaccard similarity of the highest of two scorings [n] of the same tokens, from 0 to 1 (see `top_share`).

    Raises:
        InputError: scorings of different numbers of tokens, or that `top_share` refuses.
    """
    if a.shape != b.shape:
        raise InputError(f"scores of {a.shape} and {b.shape} tokens are not of the same tokens")
    return _jaccard(top_share(a, share), top_share(b, share))


def layer_overlap(norms: Scored, share: float = SHARE) -> LayerOverlap:
    """Overlap of layer 0's choice with those of the deeper layers, and of neighbours, by scores [layers, n].

    The scores may be hidden-state norms, as the paper's importance is, or a deviation.

    Raises:
        InputError: scores of another shape, or that `top_share` refuses.
    """
    if norms.ndim != 2 or not len(norms):
        raise InputError(f"scores have shape {norms.shape}: must be [layers, tokens]")
    chosen = [top_share(layer, share) for layer in norms]
    first = [_jaccard(chosen[0], deeper) for deeper in chosen[1:]]
    neighbours = [_jaccard(upper, lower) for upper, lower in itertools.pairwise(chosen)]
    return LayerOverlap(share, _array(first), _array(neighbours), chance_overlap(norms.shape[1], share))


def model_overlap(speculative_scores: Scored, target_scores: Scored, share: float = SHARE) -> ModelOverlap:
    """Overlap of what a speculative model and its target choose, by scores [n] of the same tokens.

    Scores of another tokenizer's tokens are mapped to the target's first (SpecCache §2.4).

    Raises:
        InputError: see `top_share_overlap`.
    """
    jaccard = top_share_overlap(speculative_scores, target_scores, share)
    return ModelOverlap(share, jaccard, chance_overlap(len(target_scores), share))


def chance_overlap(num_tokens: int, share: float = SHARE) -> float:
    """The mean Jaccard similarity of two random choices of ⌈share · n⌉ out of n tokens: no agreement at all.

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


def _jaccard(a: RowMask, b: RowMask) -> float:
    return float((a & b).sum() / (a | b).sum())


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
