from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pictool.linker.policies.base import Needs, Policy, Prompt, Selection, all_rows


@dataclass(frozen=True)
class Full(Policy):
    """Fully recompute (EPIC §2.3, "FR"): every row; exactly the model's own prefill.

    The baseline of every comparison.
    """

    name: ClassVar[str] = "full"
    reference: ClassVar[str] = "EPIC §2.3"

    @property
    def needs(self) -> Needs:
        return Needs(objects=False, is_local=True)

    def select(self, prompt: Prompt) -> Selection:
        return Selection(all_rows(prompt.layout))
