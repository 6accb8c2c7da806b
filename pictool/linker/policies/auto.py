from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pictool.linker.policies.base import Knob, Policy, Prompt, Selection, all_rows
from pictool.linker.policies.legolink import LegoLink
from pictool.linker.policies.prophet import Prophet

# Tokens of a context (docs/studies/real.md): of so few reuse saves less than half the time; and below so many what 15 %
# of the rows leave matters more than the time that they take.
FEW, SHORT = 320, 2048
RATIO_OF_SHORT = 0.15


@dataclass(frozen=True)
class Auto(Prophet):
    """What answers best on the real models that were measured (docs/studies/real.md): prophet.

    A context of fewer than `FEW` tokens is computed in full, since little is saved there; of one below `SHORT` at least
    `RATIO_OF_SHORT` of the rows. LegoLink-16 takes its place where no attention is shown: on GGUF files, in vLLM, and
    for a hybrid.

    Fields:
        ratio: as of `prophet`, of contexts of `SHORT` tokens or more.
    """

    name: ClassVar[str] = "auto"
    reference: ClassVar[str] = "docs/studies/real.md"
    knob: ClassVar[Knob | None] = None

    @property
    def fallback(self) -> Policy:
        return LegoLink()

    def select(self, prompt: Prompt) -> Selection:
        if prompt.layout.num_context < FEW:
            return Selection(all_rows(prompt.layout))
        is_short = prompt.layout.num_context < SHORT
        return Prophet(max(self.ratio, RATIO_OF_SHORT) if is_short else self.ratio).select(prompt)
