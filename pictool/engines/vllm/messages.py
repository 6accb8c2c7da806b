"""What the scheduler and the workers send each other: the jobs of a step, and their outcomes. vLLM pickles them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pictool.core import RowMask, Target, TokenIds
from pictool.engines.vllm.request import Problem
from pictool.linker.plan import LinkPlan
from pictool.linker.policies.base import Selection


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: vLLM's request for it, and what objects are made for under it."""

    request: Any
    target: Target


@dataclass(frozen=True)
class LinkJob:
    """A prompt to link from position `computed` on.

    `rows` bool [N] are computed; None: the policy narrows them, from what it selects `first`.
    """

    request_id: str
    plan: LinkPlan
    rows: RowMask | None
    computed: int
    blocks: tuple[int, ...]
    first: Selection | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True)
class CompileJob:
    """A context and a chunk, to be computed and written to the store; with `later`, after all other jobs."""

    request_id: str
    tokens: TokenIds  # context and chunk
    before: int  # tokens of the context
    text: str
    blocks: tuple[int, ...]
    salt: str = field(default="", repr=False)
    later: bool = False
    adapter: Adapter | None = None


@dataclass(frozen=True)
class FailedJob:
    """A request for which vLLM waits, though no job could be made for it."""

    request_id: str
    problem: Problem


Job = LinkJob | CompileJob | FailedJob


@dataclass(frozen=True)
class JobResult:
    """The result of a job. `problem` is None if it worked; `recomputed` is the mean of context rows per layer."""

    problem: Problem | None = None
    recomputed: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0
