from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pictool.linker.policies.base import Needs, Policy, Prompt, Selection, no_rows


@dataclass(frozen=True)
class Naive(Policy):
    """Naive reuse (EPIC §2.3): no row of the context is computed, only the whole tail."""

    name: ClassVar[str] = "naive"
    reference: ClassVar[str] = "EPIC §2.3"

    @property
    def needs(self) -> Needs:
        return Needs(is_local=True, cut=0)

    def select(self, prompt: Prompt) -> Selection:
        return Selection(no_rows(prompt.layout))
