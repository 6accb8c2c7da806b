"""What follows from a pass over a log: the verdict in one line, and what to compile first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pictool.estimate.measure import Measure
from pictool.estimate.segments import BLOCK_TOKENS, MIN_TOKENS
from pictool.estimate.totals import Repeated, Tokens, Totals

WORTH = 0.05  # of all tokens that linking must add to be worth it
FIRST = 0.5  # of what linking reuses, that the documents to begin with make up


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class Report:
    """What a log says.

    Fields:
        counting: what a token is. reads: what was read, and what could not be.
        model: whose KV a cache holds, of `kv_bytes` a token.
    """

    measure: Measure
    counting: str
    reads: dict[str, Any]
    model: str
    kv_bytes: int

    @cached_property
    def totals(self) -> Totals:
        return self.measure.finish()

    @cached_property
    def documents(self) -> Sequence[Repeated]:
        """Those that linking saves the most of, first."""
        return sorted(self.measure.documents.values(), key=lambda document: (-document.saved, document.name))

    @property
    def prefill(self) -> dict[str, float]:
        """Tokens that prefill computes: with no cache, with a prefix cache, and with linking beside it."""
        tokens = self.totals.tokens
        beside = tokens.total - tokens.prefix
        return {"none": tokens.total, "prefix": beside, "legolink-16": tokens.new + self.totals.again}

    @property
    def num_first(self) -> int:
        """The fewest documents that make up half of what linking reuses."""
        saved, goal = 0.0, FIRST * self.totals.tokens.linked
        for number, document in enumerate(self.documents, 1):
            saved += document.saved
            if saved >= goal:
                return number
        return len(self.documents)

    def verdict(self) -> str:
        """The answer in one line."""
        tokens = self.totals.tokens
        prefix, linked = (share(part, tokens.total) for part in (tokens.prefix, tokens.linked))
        if tokens.prompts < 2 or not tokens.total:
            return "too few requests to tell; use a log of some hours"
        if linked < WORTH:
            if prefix < WORTH:
                return f"prefix caching reuses {prefix:.1%}, linking would add {linked:.1%}: neither is worth it"
            return f"prefix caching alone already reuses {prefix:.0%}; linking would add {linked:.1%}: not worth it"
        computed = self.prefill
        saves = 1 - share(computed["legolink-16"], computed["prefix"])
        size = f"{show_bytes(self.totals.distinct * self.kv_bytes)} would hold all distinct text"
        first = "this document" if self.num_first == 1 else f"these {self.num_first:,d} documents"
        return f"linking saves {saves:.0%} of prefill above prefix caching; {size}; start with {first}"

    def as_json(self, top: int) -> dict[str, Any]:
        """Everything that is printed, and more. Tokens, bytes; shares of 1."""
        totals = self.totals
        return {
            "verdict": self.verdict(), **self.reads,
            "assumed": {
                "tokens": self.counting, "min_tokens": MIN_TOKENS, "block_tokens": BLOCK_TOKENS,
                "model": self.model, "kv_bytes_per_token": self.kv_bytes,
            },
            "tokens": _tokens(totals.tokens) | {"missed_at_most": totals.forgotten},
            "kinds": {name: _tokens(tokens) for name, tokens in totals.kinds.items()},
            "tenants": {name: _tokens(tokens) for name, tokens in totals.tenants.items()},
            "distinct_tokens": totals.distinct, "distinct_bytes": totals.distinct * self.kv_bytes,
            "prefill": self.prefill, "compile_first": self.num_first,
            "documents": [
                {name: value for name, value in vars(document).items() if value is not None}
                for document in self.documents[:top]
            ],
        }  # fmt: skip


def _tokens(tokens: Tokens) -> dict[str, float]:
    return {
        "requests": tokens.prompts,
        "total": tokens.total,
        "prefix": tokens.prefix,
        "linked": tokens.linked,
        "new": tokens.new,
    }


def show_bytes(size: float) -> str:
    """For people: 40 GB."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
