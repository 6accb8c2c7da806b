"""The start-up check: how far linked answers of the loaded weights are from those of full recompute."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunk
from pictool.core import Chunk
from pictool.engines.base import first_token_kl
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.store.store import Store
from pictool.world.generate import write_prompt

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MAX_KL = 0.5  # nats, of the mean over the prompts
_PROMPTS, _PAGES, _SEED = 4, 4, 7
_OTHER = 96  # tokens of the question and what is around the pages


@dataclass(frozen=True)
class Checked:
    """KL(full ‖ linked) of the first token in nats, the mean over prompts, by which a policy is judged."""

    kl: float
    limit: float

    @property
    def is_good(self) -> bool:
        return self.kl <= self.limit


def check_linking(model: Model, policy: Policy, limit: float = MAX_KL) -> Checked:
    """Link a few short documents about made-up places under a policy, and under full recompute.

    Objects of the check are in a store of its own, which is removed.
    """
    divergences = []
    with tempfile.TemporaryDirectory(prefix="pic-check-") as root:
        engine = TorchEngine(model, Store(root))
        for spec in check_prompts(model, policy, model.max_positions):
            logits = [engine.link(replace(spec, policy=wanted)).logits for wanted in (make_policy(BASELINE), policy)]
            assert logits[0] is not None and logits[1] is not None
            divergences.append(first_token_kl(logits[0], logits[1]))
    return Checked(fmean(divergences), limit)


def check_prompts(model: Model, policy: Policy, positions: int) -> list[Spec]:
    """The prompts of the check, which have so many positions at most. Raises InputError if that is too few."""
    specs = []
    for number in range(_PROMPTS):
        prompt = write_prompt(random.Random(_SEED + number), _PAGES)
        chunks = [make_chunk(model, page, f"page {i}") for i, page in enumerate(prompt.pages)]
        specs.append(Spec(prompt.questions[0].text, _fitting(model, chunks, positions), policy))
    return specs


def _fitting(model: Model, pages: Sequence[Chunk], positions: int) -> list[Chunk]:
    """The pages for which a model has room, in their order.

    Raises:
        InputError: not even two.
    """
    fitting, room = list[Chunk](), positions - _OTHER
    for page in pages:
        if len(page) <= room:
            fitting.append(page)
            room -= len(page)
    if len(fitting) < 2:
        raise InputError(f"{model.name}: has too few positions for the start-up check; turn it off with --check off")
    return fitting
