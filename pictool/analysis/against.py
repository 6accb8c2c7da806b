"""A link against full recompute of the same prompt: per token and layer, and per generated token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pictool.analysis.attention import Decoded
from pictool.analysis.deviation import (
    AttentionDeviation,
    KVDeviation,
    NeighbourCorrelation,
    attention_deviation,
    kv_deviation,
    neighbour_correlation,
)
from pictool.analysis.distributions import divergence, log_softmax

if TYPE_CHECKING:
    from pictool.runtime.image import Image


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
