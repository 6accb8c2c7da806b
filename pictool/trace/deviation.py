"""How far a linked prompt is from its full recompute: KV and attention deviation (CacheBlend §4, SpecCache §1).

A link against full recompute of the same prompt: per token and layer, and per generated token.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError
from pictool.trace.attention import Decoded
from pictool.trace.distributions import divergence, log_softmax

if TYPE_CHECKING:
    from torch import Tensor

    from pictool.runtime.image import Image


@dataclass(frozen=True)
class KVDeviation:
    """How far each token's K and V are from those of full recompute, per layer. All are float32 [layers, n].

    Attributes:
        key, value: L2 norm over KV heads and dims of the difference of K and of V (CacheBlend §4.1, fig. 7). Both keys
            are rotated to the same position, so their distance does not depend on it.
        cosine: cosine distance of the concatenated K and V, from 0 (same direction) to 2 (SpecCache §1, fig. 2).
    """

    key: NDArray[np.float32]
    value: NDArray[np.float32]
    cosine: NDArray[np.float32]

    @property
    def both(self) -> NDArray[np.float32]:
        """L2 norm of the difference of the concatenated K and V, float32 [layers, n]."""
        return np.hypot(self.key, self.value)


@dataclass(frozen=True)
class AttentionDeviation:
    """How far the tail's attention is from that of full recompute (CacheBlend §4.1, fig. 6).

    Attributes:
        layers: float64 [layers]. Per layer, the Frobenius norm of the difference of the two matrices of attention
            probabilities [tail rows, n] of one head, averaged over the heads. It grows with the root of the tail's
            length, up to √(2 · tail rows): compare it between links of the same prompt.
        tokens: float32 [layers, n]. The same of each token: the L2 norm of its column, averaged over the heads.
        gained: float32 [layers, n]. The share of the tail's attention that a token draws more than under full recompute
            (less, if negative), averaged over heads and rows. Every layer sums to 0.
    """

    layers: NDArray[np.float64]
    tokens: NDArray[np.float32]
    gained: NDArray[np.float32]

    @property
    def mean(self) -> float:
        """Over the layers, as fig. 6 has it."""
        return float(self.layers.mean())


@dataclass(frozen=True)
class NeighbourCorrelation:
    """Whether the tokens that deviate at one layer do so at the next (CacheBlend §4.3, fig. 8).

    Attributes:
        layers: float64 [layers - 1]. Spearman's rank correlation, from -1 to 1, of the tokens' deviation at the layers
            i and i + 1; nan where it is not defined.
    """

    layers: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Over the pairs of layers that have a correlation; nan if none has."""
        defined = self.layers[~np.isnan(self.layers)]
        return float(defined.mean()) if len(defined) else float("nan")


def kv_deviation(linked: Image, full: Image) -> KVDeviation:
    """Compare the KV of a linked prompt with that of its full recompute. Tokens decoded since are left out.

    A K,V of zero length has the cosine distance 0 from another such and 1 from any other.

    Raises:
        InputError: images of different prompts, or of models whose KV has another shape.
    """
    _require_same_prompt(linked, full)
    layers = [_layer_deviation(linked, full, layer) for layer in range(linked.stack.num_layers)]
    key, value, cosine = (np.stack([layer[i] for layer in layers]) for i in range(3))
    return KVDeviation(key, value, cosine)


def attention_deviation(linked: Image, full: Image) -> AttentionDeviation:
    """Compare what the tail's rows attend to in a linked prompt and in its full recompute.

    Raises:
        InputError: images of different prompts, or of models whose KV has another shape.
    """
    from pictool.runtime.activations import attention_of_rows

    _require_same_prompt(linked, full)
    tail = np.arange(*linked.layout.tail)
    norms, columns, gained = [], [], []
    for ours, theirs in zip(attention_of_rows(linked, tail), attention_of_rows(full, tail), strict=True):
        difference = ours - theirs  # [heads, tail rows, n]
        norms.append(float(difference.norm(dim=(1, 2)).mean()))
        columns.append(difference.norm(dim=1).mean(0).cpu().numpy())
        gained.append(difference.mean((0, 1)).cpu().numpy())
    return AttentionDeviation(np.asarray(norms), np.stack(columns), np.stack(gained))


def neighbour_correlation(
    deviation: NDArray[np.floating[Any]], span: tuple[int, int] | None = None
) -> NeighbourCorrelation:
    """Rank correlation of the tokens' deviation [layers, n] between neighbouring layers.

    Layer 0 depends on no context: its deviation is the rounding of floats, and the first correlation says nothing.
    Leave it out with `deviation[1:]`.

    Args:
        span: the tokens [start, end) that count (default: all): the context's, or those behind the first chunk.

    Returns:
        nan, without a warning, where a layer's deviations are all equal (also: fewer than two tokens) or not numbers.

    Raises:
        InputError: an array of another shape.
    """
    if deviation.ndim != 2:
        raise InputError(f"deviations have shape {deviation.shape}: must be [layers, tokens]")
    tokens = deviation[:, slice(*span)] if span else deviation
    found = [_rank_correlation(upper, lower) for upper, lower in itertools.pairwise(tokens)]
    return NeighbourCorrelation(np.asarray(found, dtype=np.float64))


def _rank_correlation(a: NDArray[np.floating[Any]], b: NDArray[np.floating[Any]]) -> float:
    from scipy.stats import ConstantInputWarning, spearmanr

    if len(a) < 2:
        return float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        return float(spearmanr(a, b).statistic)


def _layer_deviation(linked: Image, full: Image, layer: int) -> tuple[NDArray[np.float32], ...]:
    """L2 norm of the difference of K, of V, and the cosine distance; float32 [n] each."""
    import torch

    key, value = _vectors(linked, layer)
    full_key, full_value = _vectors(full, layer)
    cosine = _cosine_distance(torch.cat([key, value], 1), torch.cat([full_key, full_value], 1))
    found = (key - full_key).norm(dim=1), (value - full_value).norm(dim=1), cosine
    return tuple(x.cpu().numpy() for x in found)


def _vectors(image: Image, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of the prompt's tokens as one vector per token, float32 [n, kv_heads · head_dim]."""
    end = image.layout.num_tokens
    key, value = (x[0, :, :end].float().transpose(0, 1).flatten(1) for x in (image.key(layer), image.value(layer)))
    return key, value


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos of the vectors [n, size], as half the squared chord: exactly 0 for equal ones, without cancellation."""
    import torch

    length_a, length_b = a.norm(dim=1), b.norm(dim=1)
    smallest = torch.finfo(a.dtype).tiny
    unit_a, unit_b = a / length_a.clamp_min(smallest)[:, None], b / length_b.clamp_min(smallest)[:, None]
    distance = (unit_a - unit_b).square().sum(1) / 2
    return torch.where((length_a == 0) ^ (length_b == 0), torch.ones_like(distance), distance.clamp_max(2))


def _require_same_prompt(linked: Image, full: Image) -> None:
    ours, theirs = linked.layout, full.layout
    if not np.array_equal(ours.tokens, theirs.tokens):
        raise InputError(
            f"images of different prompts ({ours.num_tokens} and {theirs.num_tokens} tokens) cannot be compared; link "
            "the same documents and query"
        )
    if linked.stack.geometry != full.stack.geometry:
        raise InputError(
            f"images of different models cannot be compared: their KV is {linked.stack.geometry} and "
            f"{full.stack.geometry}"
        )


@dataclass(frozen=True)
class GeneratedAgainst:
    """One generated token, by the linked prompt and by its full recompute, with the same tokens before it.

    Attributes:
        kl: KL(full ‖ linked) in nats. linked, full: the probabilities of the token.
        choice: the token that full recompute finds likeliest here; choice_linked, choice_full: its probabilities.
    """

    token: int
    kl: float
    linked: float
    full: float
    choice: int
    choice_linked: float
    choice_full: float


@dataclass(frozen=True)
class Against:
    """How far a link is from full recompute.

    Attributes:
        kv, attention: per layer and token.
        correlation: of the KV deviation of the chunks' tokens between neighbouring layers, from layer 1 on.
        generated: one for each generated token.
    """

    kv: KVDeviation
    attention: AttentionDeviation
    correlation: NeighbourCorrelation
    generated: tuple[GeneratedAgainst, ...]


def against_full(linked: Image, full: Image, decoded: Decoded, decoded_full: Decoded, tokens: Sequence[int]) -> Against:
    """Compare a linked prompt and what was decoded from it with full recompute, given the same tokens.

    Raises:
        InputError: images of different prompts or models.
    """
    kv, attention = kv_deviation(linked, full), attention_deviation(linked, full)
    correlation = neighbour_correlation(kv.both[1:], (linked.layout.head[1], linked.layout.num_context))
    pairs = zip(tokens, decoded.logits, decoded_full.logits, strict=True)
    return Against(kv, attention, correlation, tuple(_generated(*pair) for pair in pairs))


def _generated(token: int, linked: NDArray[np.float32], full: NDArray[np.float32]) -> GeneratedAgainst:
    p, q = log_softmax(linked), log_softmax(full)
    choice = int(full.argmax())
    mine, theirs, choice_mine, choice_theirs = np.exp([p[token], q[token], p[choice], q[choice]]).tolist()
    return GeneratedAgainst(token, divergence(q, p), mine, theirs, choice, choice_mine, choice_theirs)
