"""What a question was answered with, and at what cost: the numbers of one answer, without its image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from pictool.engines.base import Answer
    from pictool.linker.spec import Spec

Ask = Callable[["Spec"], "Answer"]


@dataclass(frozen=True)
class Times:
    """Seconds. load_s, select_s and recompute_s are parts of ttft_s, as in a link's timing; decode_s follows it."""

    ttft_s: float
    load_s: float
    select_s: float
    recompute_s: float
    decode_s: float


@dataclass(frozen=True)
class Reply:
    """An answer and its costs.

    `rows` is the mean number of context rows that were computed per layer, in all calls of the model together.
    """

    text: str
    tokens: tuple[int, ...]  # generated
    logprobs: tuple[float, ...]
    logits: Tensor | None  # of the first token, float32 [vocab]; None where they are not those of the same prompt
    rows: float
    bytes_read: int
    times: Times

    @classmethod
    def of(cls, answer: Answer) -> Reply:
        linked, timing = answer.linked, answer.linked.timing
        return cls(
            answer.text, answer.generated.tokens, answer.generated.logprobs, answer.logits,
            linked.recomputed, linked.bytes_read,
            Times(timing.ttft_s, timing.load_s, timing.select_s, timing.recompute_s, answer.decode_s),
        )  # fmt: skip

    @property
    def confidence(self) -> float:
        """Mean log-probability of the generated tokens, in nats."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")
