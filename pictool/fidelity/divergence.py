"""How far linked answers are from those of full recompute, and how much sooner they come, on a few short prompts.

What is judged is KL(full ‖ linked) over whole answers, next to that of blind reuse: `naive`, over chunks that were
compiled without contexts. The first token's alone misleads: a policy can leave a hundredth of a nat there, and nats of
the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from pictool.compiler.chunking import last_tokens, make_chunk
from pictool.compiler.compile import Compiled
from pictool.compiler.contexts import PREVIOUS
from pictool.core import Chunk
from pictool.engines.base import Comparison, Engine
from pictool.errors import InputError
from pictool.linker.grid import LabelledPolicy
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec

if TYPE_CHECKING:
    from pictool.runtime.model import Model

YARDSTICK = LabelledPolicy("naive@none", make_policy("naive"), "none")
MAX_SHARE = 0.3  # of the yardstick's KL: a policy that leaves more, and more than `FEW_NATS`, does not suit the model
FEW_NATS = 0.5  # an answer, in the mean
_PROMPTS, _PAGES, _SEED = 4, 11, 7
_TOKENS = 12  # of an answer, at most
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
    """A policy on several prompts, each against full recompute, and the yardstick on the same ones."""

    policy: Policy
    own: tuple[Comparison, ...]
    naive: tuple[Comparison, ...]

    @property
    def nats(self) -> float:
        """KL(full ‖ linked) an answer, in the mean; of an engine that forces no answers, that of its first token."""
        return fmean(each.nats for each in self.own)

    @property
    def share(self) -> float:
        """How much of the yardstick's is left."""
        return self.nats / max(fmean(each.nats for each in self.naive), 1e-9)

    def is_far(self, limit: float) -> bool:
        """Whether more is left than this share, and than a few nats; also if it is not a number."""
        return not (self.nats <= FEW_NATS or self.share <= limit)

    def __str__(self) -> str:
        first = "" if self.own[0].answer_kl is not None else "the first token of "
        return (
            f"{self.nats:.2g} nats of {first}an answer, {self.share:.0%} of blind reuse's; "
            f"{sum(each.same_answer for each in self.own)} of {len(self.own)} answers are full's"
        )


def measure_divergence(
    engine: Engine, policies: Sequence[Policy], after: str = PREVIOUS, positions: int | None = None,
    is_timed: bool = False, on_compile: Callable[[Compiled], None] | None = None,
) -> list[Divergence]:  # fmt: skip
    """Answer a few short prompts under full recompute, under the yardstick and under these policies.

    Args:
        after: what the policies' documents are compiled after.
        positions: of a prompt at most, if fewer than the model has.
        is_timed: link each prompt once before, so that TTFT is without compiling and what a first link sets up.

    Raises:
        InputError: a model that has no room for two of the documents. PicError: as of `Engine.run`.
    """
    compared = list[list[Comparison]]()
    for spec in check_prompts(engine.model, make_policy(BASELINE), positions or engine.model.max_positions):
        naive = replace(spec, policy=YARDSTICK.policy, after=YARDSTICK.after)
        specs = [naive, *(replace(spec, policy=policy, after=after) for policy in policies)]
        if is_timed:
            for each in (spec, *specs):
                engine.link(each)
        full = engine.run(spec)
        compared.append([engine.compare(each, engine.run(each, on_compile=on_compile), full) for each in specs])
    yardstick, *own = zip(*compared, strict=True)
    return [Divergence(policy, each, yardstick) for policy, each in zip(policies, own, strict=True)]


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
    """A few questions over texts about made-up places, cut into pages, which have so many positions at most.

    Raises:
        InputError: a model that has no room for two of the pages.
    """
    specs = []
    for number in range(_PROMPTS):
        pages, towns = made_up_book(_SEED + number // 2)
        spec = Spec(f"On which river does {towns[1 + number]} lie?", (), policy, max_new_tokens=_TOKENS, is_fresh=True)
        frame = spec.frame(model)
        room = positions - max(_OTHER, len(model.encode(frame.head)) + len(model.encode(frame.tail)) + _TOKENS)
        fitting = list[Chunk]()
        for page, text in enumerate(pages):
            chunk = make_chunk(model, text, f"page {page}", bool(fitting), last_tokens(fitting))
            if len(chunk) <= room:
                fitting.append(chunk)
                room -= len(chunk)
        if len(fitting) < 2:
            raise InputError(
                f"{model.name}: has too few positions ({model.max_positions}) to compare linked answers on"
            )
        specs.append(replace(spec, documents=fitting))
    return specs
