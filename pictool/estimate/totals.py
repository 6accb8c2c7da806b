"""What a pass over a log counts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Tokens:
    """Sums over prompts."""

    prompts: int = 0
    total: float = 0.0
    prefix: float = 0.0
    linked: float = 0.0  # beyond the prefix

    def add(self, prompts: int, total: float, prefix: float, linked: float) -> None:
        self.prompts += prompts
        self.total += total
        self.prefix += prefix
        self.linked += linked

    @property
    def new(self) -> float:
        return self.total - self.prefix - self.linked


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
class Totals:
    """What a pass found, in tokens.

    Fields:
        again: of linked documents, tokens that legolink-16 computes again.
        distinct: of different blocks, what a store of all of them holds.
        forgotten: by how much prefix and linkable may be too low, because memory was used up.
    """

    tokens: Tokens = field(default_factory=Tokens)
    kinds: dict[str, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    tenants: dict[str, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    again: float = 0.0
    distinct: float = 0.0
    forgotten: float = 0.0
