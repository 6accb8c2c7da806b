"""What scheduler and workers tell each other: jobs of a step, and what became of them. Plain data, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pictool.core import RowMask, TokenIds
from pictool.engines.vllm.plan import LinkPlan


@dataclass(frozen=True)
class LinkJob:
    """A request to link, from position `computed` on. `rows` bool [N] are computed; None: the policy narrows."""

    request_id: str
    plan: LinkPlan
    rows: RowMask | None
    computed: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class CompileJob:
    """A prompt of sinks and a chunk, to be computed and written to the store."""

    request_id: str
    tokens: TokenIds  # sinks and chunk
    sinks: int
    text: str
    blocks: tuple[int, ...]
    salt: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a job. `problem` is None if it worked. `recomputed` is the mean of context rows per layer."""

    problem: str | None = None
    recomputed: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0


@dataclass
class Counts:
    """What is counted between two looks at the metrics."""

    linked: int = 0
    failed: int = 0
    reused_tokens: float = 0.0
    recomputed_tokens: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass
class Report:
    """What a request's response says under `kv_transfer_params["pic"]`."""

    policy: str
    chunks: int = 0
    context: int = 0
    state: str = "waiting"  # then linked, cached, compiled, or exact
    recomputed: float | None = None
    timing: dict[str, float] = field(default_factory=dict)
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))
