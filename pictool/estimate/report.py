"""What follows from a pass over a log: the verdict in one line, the working set, what to compile first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pictool.estimate.costs import BreakEven, CostRates, ModelSize
from pictool.estimate.measure import LARGE_BLOCK, Measure
from pictool.estimate.segments import BLOCK_TOKENS
from pictool.estimate.totals import WAYS, Repeated, Tokens, Totals

WORTH = 0.05  # of all tokens that linking must add to be worth it
HOLDS = 0.9  # of what linking reuses, that the working set holds
FIRST = 0.5  # of what linking reuses, that the documents to begin with make up


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class Report:
    """What a log says.

    Fields:
        counting: what a token is. reads: what was read, and what could not be.
    """

    measure: Measure
    counting: str
    reads: dict[str, Any]
    size: ModelSize
    rates: CostRates | None

    @cached_property
    def totals(self) -> Totals:
        return self.measure.finish()

    @cached_property
    def documents(self) -> Sequence[Repeated]:
        """Those that linking saves the most of, first."""
        return sorted(self.measure.documents.values(), key=lambda document: (-document.saved, document.name))

    @property
    def saves(self) -> float:
        """The share of the prefill beyond a prefix cache that legolink-16 saves, in tokens."""
        computed = self.totals.computed
        return 1 - share(computed["legolink-16"].rows, computed["prefix"].rows) if computed["prefix"].rows else 0.0

    @property
    def working_set(self) -> int | None:
        """The least of the capacities, in tokens, that holds most of what linking reuses; None: none of them does."""
        goal = HOLDS * self.totals.tokens.linked
        pairs = zip(self.measure.capacities, self.totals.linked_at.tolist(), strict=True)
        held = next((capacity for capacity, linked in sorted(pairs) if linked >= goal), None)
        return None if held is None else min(held, round(self.totals.distinct))

    @property
    def num_first(self) -> int:
        """The fewest documents that make up half of what linking reuses."""
        saved, goal = 0.0, FIRST * self.totals.tokens.linked
        for number, document in enumerate(self.documents, 1):
            saved += document.saved
            if saved >= goal:
                return number
        return len(self.documents)

    @property
    def break_even(self) -> BreakEven | None:
        linked = share(self.totals.tokens.linked, self.totals.num_linked)
        return None if self.rates is None or not linked else BreakEven.of(self.size, self.rates, linked)

    def verdict(self) -> str:
        """The answer in one line."""
        tokens = self.totals.tokens
        prefix, linked, most = (share(part, tokens.total) for part in (tokens.prefix, tokens.linked, tokens.most))
        if tokens.prompts < 2 or not tokens.total:
            return "too few requests to say: name a log of some hours"
        if not self.measure.linked_is_known:
            return f"a prefix cache reuses {prefix:.1%}; this log cannot tell what linking adds: it hashes prefixes"
        if linked < WORTH:
            more = (
                f"; {most:.0%} are repeated, but in pieces"
                if self.measure.most_is_known and most > prefix + linked + 0.2
                else ""
            )
            if prefix < WORTH:
                return f"prefix caching reuses {prefix:.1%}, linking would add {linked:.1%}: neither is worth it{more}"
            return (
                f"prefix caching alone already reuses {prefix:.0%}; linking would add {linked:.1%}: not worth it{more}"
            )
        held = self.working_set
        size = "" if held is None else f"; {show_bytes(held * self.size.kv_bytes)} hold {HOLDS:.0%} of it"
        first = "this document" if self.num_first == 1 else f"these {self.num_first:,d} documents"
        return f"linking saves {self.saves:.0%} of prefill above prefix caching{size}; start with {first}"

    def seconds(self, way: str) -> float | None:
        """Seconds of prefill of all requests under one way to reuse."""
        if self.rates is None:
            return None
        is_linked = way not in ("none", "prefix")
        loaded = self.totals.tokens.linked * self.size.kv_bytes if is_linked else 0.0
        return self.rates.seconds(self.totals.computed[way], loaded)

    def as_json(self, top: int) -> dict[str, Any]:
        """Everything that is printed, and more. Tokens, bytes, seconds; shares of 1."""
        totals, even = self.totals, self.break_even
        return {
            "verdict": self.verdict(), **self.reads,
            "assumed": {
                "tokens": self.counting, "min_tokens": self.measure.scale.min_tokens, "block_tokens": BLOCK_TOKENS,
                "model": self.size.name, "kv_bytes_per_token": self.size.kv_bytes,
                "rates": None if self.rates is None else self.rates.source,
            },
            "tokens": self._tokens(totals.tokens) | {
                "at_most_error": totals.most_error if self.measure.most_is_known else None,
                "sampled_1_in": self.measure.sample_rate, "missed_at_most": totals.forgotten,
            },
            "kinds": {name: self._tokens(tokens) for name, tokens in totals.kinds.items()},
            "tenants": {name: self._tokens(tokens) for name, tokens in totals.tenants.items()},
            "hours_utc": {str(hour): self._tokens(totals.hours[hour]) for hour in sorted(totals.hours)},
            "capacities": [
                {"tokens": capacity, "bytes": capacity * self.size.kv_bytes, "prefix": prefix, "linked": linked}
                for capacity, prefix, linked in self.curve()
            ],
            "distinct_tokens": totals.distinct, "distinct_bytes": totals.distinct * self.size.kv_bytes,
            "prefill": {
                way: {"tokens": totals.computed[way].rows, "flops": self.size.flops(totals.computed[way]),
                      "seconds": self.seconds(way)}
                for way in WAYS
            },
            "lost_tokens": self._lost_tokens(),
            "outputs": {"tokens": totals.outputs, "returned": totals.returned},
            "break_even": None if even is None else vars(even),
            "seconds": totals.seconds, "tokenizer_s": totals.tokenizer_s,
            "linked_documents": totals.num_linked, "compile_first": self.num_first,
            "documents": [self._document(document) for document in self.documents[:top]],
        }  # fmt: skip

    def _lost_tokens(self) -> dict[str, float | None]:
        losses = self.totals.losses
        return {
            f"linked_in_blocks_of_{BLOCK_TOKENS}": losses[f"linked {BLOCK_TOKENS}"],
            f"linked_in_blocks_of_{LARGE_BLOCK}": losses[f"linked {LARGE_BLOCK}"],
            f"prefix_in_blocks_of_{LARGE_BLOCK}": losses[f"prefix {LARGE_BLOCK}"],
            "at_a_border": self.totals.border_loss,
        }

    def curve(self) -> list[tuple[int, float, float]]:
        """(capacity in tokens, tokens that an LRU cache of prefixes reuses, and one of documents)."""
        totals = self.totals
        return sorted(zip(self.measure.capacities, totals.prefix_at.tolist(), totals.linked_at.tolist(), strict=True))

    def _tokens(self, tokens: Tokens) -> dict[str, float | None]:
        new = tokens.total - tokens.prefix - tokens.linked
        return {
            "requests": tokens.prompts,
            "total": tokens.total,
            "prefix": tokens.prefix,
            "linked": tokens.linked if self.measure.linked_is_known else None,
            "at_most": tokens.most if self.measure.most_is_known else None,
            "new": new,
        }

    @staticmethod
    def _document(document: Repeated) -> dict[str, Any]:
        return {name: value for name, value in vars(document).items() if value is not None}


def show_bytes(size: float) -> str:
    """For people: 40 GB."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
