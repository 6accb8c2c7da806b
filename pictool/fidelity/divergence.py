"""How far linked answers are from those of full recompute, and how much sooner they come, on a few short prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks
from pictool.core import Chunk
from pictool.engines.base import Engine, LinkResult, first_token_kl
from pictool.errors import InputError
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MAX_KL = 0.5  # nats, of the mean over the prompts: a policy beyond does not suit the model
_PROMPTS, _PAGES, _SEED = 4, 4, 7
_OTHER = 96  # tokens of the question and what is around the pages
_TOWNS = (
    "Baldale Disford Fubwick Hirholm Kukstead Mindale Nudford Rimwick Suvholm Vilstead Wusdale Bebford Durwick Gekholm "
    "Hunstead Leddale Mumford Pevwick Rulholm Tesstead"
).split()
_RIVERS = "Balwen Fumne Konmere Nirlow Seswen Wavne Budmere Goklow Libwen Pilne Temmere Zanlow".split()
_FESTIVALS = "Ballia Fivry Kammoon Midfair Ranlia Tikry Zarmoon Dibfair Haslia Lolry Pavmoon Somfair".split()
_FILLER = (
    "the road was quiet in those years", "the old bridge looked much the same after the storm",
    "the market was open to all before winter", "the weather was often described as travellers wrote",
)  # fmt: skip


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


def made_up_book(seed: int) -> tuple[list[str], list[str]]:
    """Pages about made-up towns, and the town of each, which only the page before names: a page says `It`."""
    rng = random.Random(seed)
    towns = rng.sample(_TOWNS, _PAGES + 1)
    rivers, festivals = rng.sample(_RIVERS, _PAGES), rng.sample(_FESTIVALS, _PAGES)
    pages = list[str]()
    for (town, following), river, festival in zip(pairwise(towns), rivers, festivals, strict=True):
        start = "It" if pages else f"Here begins a new book. {town}"
        filler = rng.choice(_FILLER).capitalize()
        pages.append(
            f"{start} holds the {festival} festival. It lies on the river {river}. {filler}. "
            f"The next page is about {following}.\n"
        )
    return pages, towns


def check_prompts(model: Model, policy: Policy, positions: int) -> list[Spec]:
    """A few questions over short documents about made-up places, which have so many positions at most.

    Raises:
        InputError: a model that has no room for two of the documents.
    """
    specs = []
    for number in range(_PROMPTS):
        pages, towns = made_up_book(_SEED + number)
        spec = Spec(f"On which river does {towns[number % 2]} lie?", (), policy)
        frame, separator = spec.frame(model), len(model.encode(spec.separator_for(model)))
        room = positions - max(_OTHER, len(model.encode(frame.head)) + len(model.encode(frame.tail)) + 1)
        fitting = list[Chunk]()
        for page, text in enumerate(pages):
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
