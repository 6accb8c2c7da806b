"""What the vLLM engine answers, and how that compares with vLLM's own full prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pictool.core import Layout
from pictool.engines.base import Comparison, first_token_kl
from pictool.errors import InputError
from pictool.linker.policies.base import Policy
from pictool.runtime.decode import Generated

ENGINE = "vllm"


@dataclass(frozen=True)
class Answer:
    """What a request gives. `logprobs` are the first token's, over the vocabulary, if it was compared."""

    generated: Generated
    policy: Policy
    layout: Layout
    recomputed: float
    timing: Mapping[str, float]
    model: str
    logprobs: torch.Tensor | None = None
    compare: Comparison | None = None

    @property
    def text(self) -> str:
        return self.generated.text.strip()

    def report(self) -> dict[str, Any]:
        """The JSON of `pic link --json` (DESIGN §6)."""
        layout = self.layout
        return {
            "answer": self.text,
            "algo": self.policy.name,
            "params": self.policy.params,
            "model": self.model,
            "engine": ENGINE,
            "tokens": {
                "head": layout.starts[1],
                "context": layout.num_context,
                "tail": layout.num_tokens - layout.num_context,
                "prompt": layout.num_tokens,
                "recomputed": self.recomputed,
                "generated": len(self.generated.tokens),
            },
            "timing": dict(self.timing),
            "compare": self.compare.report() if self.compare else None,
        }


def recomputed_of(report: Mapping[str, Any] | None, layout: Layout) -> float:
    """Mean context rows per layer. A request that should have been linked and was not is an error here.

    Raises:
        InputError: says what was wrong with an object.
    """
    if report is None:
        return float(layout.num_context)
    if report["problem"] is not None:
        raise InputError(str(report["problem"]))
    return float(report["recomputed"] or 0)


def timing_of(report: Mapping[str, Any] | None, ttft_s: float, total_s: float) -> dict[str, float]:
    """As our own engine tells it: what is neither loading nor choosing is computing."""
    told = {} if report is None else report["timing"]
    load_s, select_s = told.get("load_s", 0.0), told.get("select_s", 0.0)
    return {
        "load_s": load_s, "select_s": select_s, "recompute_s": ttft_s - load_s - select_s, "ttft_s": ttft_s,
        "decode_s": max(0.0, total_s - ttft_s),
    }  # fmt: skip


def dense(entries: Mapping[int, Any]) -> torch.Tensor:
    """Log-probabilities by token as a vector."""
    return torch.tensor([entries[token].logprob for token in range(len(entries))])


def compare_answers(mine: Answer, full: Answer) -> Comparison:
    a, b = mine.generated.tokens, full.generated.tokens
    assert mine.logprobs is not None and full.logprobs is not None
    return Comparison(
        answer=full.text,
        ttft_s=full.timing["ttft_s"],
        speedup=full.timing["ttft_s"] / mine.timing["ttft_s"],
        kl=first_token_kl(full.logprobs, mine.logprobs),
        same_first_token=bool(full.logprobs.argmax() == mine.logprobs.argmax()),
        same_answer=mine.text == full.text,
        common_prefix=next(
            (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
        ),
    )
