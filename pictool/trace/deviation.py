"""Deviation of a linked prompt from its full recompute (CacheBlend §4, SpecCache §1).

Of KV and attention per token and layer, and of the probabilities of every generated token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError
from pictool.trace.attention import DecodedTokens
from pictool.trace.counts import log_softmax
from pictool.trace.diff import kl_divergence

if TYPE_CHECKING:
    from torch import Tensor

    from pictool.runtime.memory.image import Image


@dataclass(frozen=True)
class KVDeviation:
    """Deviation of each token's K and V from full recompute, per layer. All are float32 [layers, n].

    Attributes:
        key, value: the L2 norm over KV heads and dims of the difference of K and of V (CacheBlend §4.1, fig. 7). Both
            keys are rotated to the same position, so their distance does not depend on it.
        cosine: cosine distance of the concatenated K and V, from 0 (same direction) to 2 (SpecCache §1, fig. 2).
    """

    key: NDArray[np.float32]
    value: NDArray[np.float32]
    cosine: NDArray[np.float32]

    @property
    def both(self) -> NDArray[np.float32]:
        """The L2 norm of the difference of the concatenated K and V, float32 [layers, n]."""
        return np.hypot(self.key, self.value)


@dataclass(frozen=True)
class AttentionDeviation:
    """Deviation of the tail's attention from full recompute (CacheBlend §4.1, fig. 6).

    Attributes:
        layers: float64 [layers], the Frobenius norm of the difference of the two attention matrices [tail rows, n] of
            a head, averaged over the heads. It grows with the root of the tail's length, up to √(2 · tail rows):
            compare it between links of the same prompt.
        tokens: float32 [layers, n], the L2 norm of each token's column of that difference, averaged over the heads.
        gained: float32 [layers, n], the share of the tail's attention that a token draws more than under full
            recompute (less, if negative), averaged over heads and rows. Every layer sums to 0.
    """

    layers: NDArray[np.float64]
    tokens: NDArray[np.float32]
    gained: NDArray[np.float32]

    @property
    def mean(self) -> float:
        """The mean over the layers, as in fig. 6."""
        return float(self.layers.mean())


@dataclass(frozen=True)
class GeneratedDeviation:
    """One generated token under the link and under full recompute, with the same tokens before it.

    Attributes:
        kl: KL(full ‖ linked) in nats. linked, full: the probability of the token under each.
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
class DeviationFromFull:
    """The deviation of a link from full recompute.

    Attributes:
        kv, attention: per layer and token.
        generated: one for each generated token.
    """

    kv: KVDeviation
    attention: AttentionDeviation
    generated: tuple[GeneratedDeviation, ...]


def deviation_from_full(
    linked: Image, full: Image, decoded: DecodedTokens, decoded_full: DecodedTokens, tokens: Sequence[int]
) -> DeviationFromFull:
    """Compare a linked prompt and the tokens decoded after it with full recompute of the same prompt and tokens.

    Raises:
        InputError: images of different prompts or models.
    """
    pairs = zip(tokens, decoded.logits, decoded_full.logits, strict=True)
    return DeviationFromFull(
        kv=kv_deviation(linked, full),
        attention=attention_deviation(linked, full),
        generated=tuple(_generated_deviation(*pair) for pair in pairs),
    )


def kv_deviation(linked: Image, full: Image) -> KVDeviation:
    """Compare the KV of a linked prompt with that of its full recompute. Tokens decoded after it are left out.

    Two K,V of zero length have the cosine distance 0; one of them has the distance 1 from any other K,V.

    Raises:
        InputError: images of different prompts, or of models whose KV has another shape.
    """
    _require_same_prompt(linked, full)
    layers = [_layer_deviation(linked, full, layer) for layer in range(linked.stack.num_layers)]
    key, value, cosine = (np.stack([layer[i] for layer in layers]) for i in range(3))
    return KVDeviation(key, value, cosine)


def attention_deviation(linked: Image, full: Image) -> AttentionDeviation:
    """Compare the attention of the tail's rows in a linked prompt and in its full recompute.

    Raises:
        InputError: images of different prompts, or of models whose KV has another shape.
    """
    from pictool.runtime.activations import attention_of_rows

    _require_same_prompt(linked, full)
    tail = np.arange(*linked.layout.tail)
    norms, columns, gained = [], [], []
    for of_linked, of_full in zip(attention_of_rows(linked, tail), attention_of_rows(full, tail), strict=True):
        difference = of_linked - of_full  # [heads, tail rows, n]
        norms.append(float(difference.norm(dim=(1, 2)).mean()))
        columns.append(difference.norm(dim=1).mean(0).cpu().numpy())
        gained.append(difference.mean((0, 1)).cpu().numpy())
    return AttentionDeviation(np.asarray(norms), np.stack(columns), np.stack(gained))


def _layer_deviation(linked: Image, full: Image, layer: int) -> tuple[NDArray[np.float32], ...]:
    """Return the L2 norm of the difference of K and of V, and the cosine distance; float32 [n] each."""
    import torch

    key, value = _vectors(linked, layer)
    full_key, full_value = _vectors(full, layer)
    cosine = _cosine_distance(torch.cat([key, value], 1), torch.cat([full_key, full_value], 1))
    by_token = (key - full_key).norm(dim=1), (value - full_value).norm(dim=1), cosine
    return tuple(tensor.cpu().numpy() for tensor in by_token)


def _vectors(image: Image, layer: int) -> tuple[Tensor, Tensor]:
    """Return K and V of the prompt as one vector per token, float32 [n, kv_heads · head_dim] each."""
    end = image.layout.num_tokens
    key, value = (x[0, :, :end].float().transpose(0, 1).flatten(1) for x in (image.key(layer), image.value(layer)))
    return key, value


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 - cos of vectors [n, size], as half the squared chord: exactly 0 for equal ones, no cancellation."""
    import torch

    length_a, length_b = a.norm(dim=1), b.norm(dim=1)
    smallest = torch.finfo(a.dtype).tiny
    unit_a, unit_b = a / length_a.clamp_min(smallest)[:, None], b / length_b.clamp_min(smallest)[:, None]
    distance = (unit_a - unit_b).square().sum(1) / 2
    return torch.where((length_a == 0) ^ (length_b == 0), torch.ones_like(distance), distance.clamp_max(2))


def _require_same_prompt(linked: Image, full: Image) -> None:
    of_linked, of_full = linked.layout, full.layout
    if not np.array_equal(of_linked.tokens, of_full.tokens):
        raise InputError(
            f"images of different prompts ({of_linked.num_tokens} and {of_full.num_tokens} tokens) cannot be compared; "
            "link the same documents and query"
        )
    if linked.stack.geometry != full.stack.geometry:
        raise InputError(
            f"images of different models cannot be compared: their KV is {linked.stack.geometry} and "
            f"{full.stack.geometry}"
        )


def _generated_deviation(token: int, linked: NDArray[np.float32], full: NDArray[np.float32]) -> GeneratedDeviation:
    """Compare the logits [vocab] that a token was chosen by with those of full recompute."""
    p, q = log_softmax(linked), log_softmax(full)
    choice = int(full.argmax())
    of_linked, of_full, choice_linked, choice_full = np.exp([p[token], q[token], p[choice], q[choice]]).tolist()
    return GeneratedDeviation(token, kl_divergence(q, p), of_linked, of_full, choice, choice_linked, choice_full)
