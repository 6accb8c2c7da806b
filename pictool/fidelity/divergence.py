"""How far linked answers are from those of full recompute, and how much sooner they come, on a few short prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks
from pictool.core import Chunk
from pictool.engines.base import Engine, LinkResult, first_token_kl
from pictool.errors import InputError
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.world.generate import write_prompt

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MAX_KL = 0.5  # nats, of the mean over the prompts: a policy beyond does not suit the model
_PROMPTS, _PAGES, _SEED = 4, 4, 7
_OTHER = 96  # tokens of the question and what is around the pages


@dataclass(frozen=True)
class Divergence:
    """A policy on several prompts: KL(full ‖ linked) of the first token in nats, and TTFT in seconds, of each."""

    policy: Policy
    kl: tuple[float, ...]
    ttft_s: tuple[float, ...]
    full_ttft_s: tuple[float, ...]

    @property
    def mean_kl(self) -> float:
        return fmean(self.kl)

    @property
    def speedup(self) -> float:
        """The median of the prompts' ratios: TTFT of full ÷ this one's."""
        return median(full / own for full, own in zip(self.full_ttft_s, self.ttft_s, strict=True))


def measure_divergence(engine: Engine, policies: Sequence[Policy], is_timed: bool = False) -> list[Divergence]:
    """Link a few short prompts under full recompute and under these policies.

    Args:
        is_timed: link each prompt once before, so that TTFT is without compiling and what a first link sets up.

    Raises:
        InputError: a model that has no room for two of the documents. PicError: as of `Engine.link`.
    """
    results: list[list[LinkResult]] = []
    for spec in check_prompts(engine.model, make_policy(BASELINE), engine.model.max_positions):
        specs = [spec, *(replace(spec, policy=policy) for policy in policies)]
        if is_timed:
            for each in specs:
                engine.link(each)
        results.append([engine.link(each) for each in specs])
    full, *linked = zip(*results, strict=True)
    return [_divergence(policy, full, own) for policy, own in zip(policies, linked, strict=True)]


def check_prompts(model: Model, policy: Policy, positions: int) -> list[Spec]:
    """A few questions over short documents about made-up places, which have so many positions at most.

    Raises:
        InputError: a model that has no room for two of the documents.
    """
    specs = []
    for number in range(_PROMPTS):
        prompt = write_prompt(random.Random(_SEED + number), _PAGES)
        spec = Spec(prompt.questions[0].text, (), policy)
        frame, separator = spec.frame(model), len(model.encode(spec.separator_for(model)))
        room = positions - max(_OTHER, len(model.encode(frame.head)) + len(model.encode(frame.tail)) + 1)
        fitting = list[Chunk]()
        for page, text in enumerate(prompt.pages):
            (chunk, *_) = make_chunks(model, text, f"page {page}")
            if len(chunk) + separator <= room:
                fitting.append(chunk)
                room -= len(chunk) + separator
        if len(fitting) < 2:
            raise InputError(
                f"{model.name}: has too few positions ({model.max_positions}) to compare linked answers on"
            )
        specs.append(replace(spec, documents=fitting))
    return specs


def _divergence(policy: Policy, full: Sequence[LinkResult], own: Sequence[LinkResult]) -> Divergence:
    exact, linked = ([part.logits.cpu() for part in parts if part.logits is not None] for parts in (full, own))
    return Divergence(
        policy,
        kl=tuple(first_token_kl(a, b) for a, b in zip(exact, linked, strict=True)),
        ttft_s=tuple(result.timing.ttft_s for result in own),
        full_ttft_s=tuple(result.timing.ttft_s for result in full),
    )
