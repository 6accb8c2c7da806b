"""What a pass over a log counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WAYS = ("none", "prefix", "naive", "legolink-16", "fixup-10")


@dataclass
class Tokens:
    """Sums over prompts."""

    prompts: int = 0
    total: float = 0.0
    prefix: float = 0.0
    linked: float = 0.0  # beyond the prefix
    most: float = 0.0

    def add(self, prompts: int, total: float, prefix: float, linked: float, most: float) -> None:
        self.prompts += prompts
        self.total += total
        self.prefix += prefix
        self.linked += linked
        self.most += most


@dataclass
class Repeated:
    """A document that prompts repeat: what it is called, how often it was linked beyond a prefix, and its tokens."""

    name: str
    kind: str
    tokens: float
    uses: int = 0
    saved: float = 0.0
    text: str | None = None


@dataclass
class Computed:
    """Tokens that prefill computes in all, and pairs of them in attention, under one way to reuse."""

    rows: float = 0.0
    pairs: float = 0.0


@dataclass
class Totals:
    """What a pass found, in tokens.

    Fields:
        prefix_at, linked_at: reused by LRU caches of the capacities, in their order.
        distinct: of different blocks, what a store of all of them holds.
        losses: tokens of linked documents that blocks of 16 and 256 tokens do not hold; of prefixes, 256 against 16.
        returned: of outputs in the log that came back in prompts; None: no outputs are in it.
        forgotten: by how much prefix and linkable may be too low, because memory was used up.
        border_loss: tokens that a tokenizer merges over a border of two parts, in the mean; None: not known.
        seconds: of the pass. tokenizer_s: of these, in the tokenizer.
    """

    tokens: Tokens = field(default_factory=Tokens)
    kinds: dict[str, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    tenants: dict[str, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    hours: dict[int, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    computed: dict[str, Computed] = field(default_factory=lambda: {way: Computed() for way in WAYS})
    losses: Counter[str] = field(default_factory=Counter)
    prefix_at: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    linked_at: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    distinct: float = 0.0
    hashed: int = 0  # prompts of which the log has hashes only
    chained: int = 0  # of these, such whose hashes are of all that comes before
    num_linked: int = 0  # documents
    outputs: float | None = None
    returned: float | None = None
    forgotten: float = 0.0
    most_error: float = 0.0
    border_loss: float | None = None
    seconds: float = 0.0
    tokenizer_s: float = 0.0
