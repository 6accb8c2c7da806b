from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pictool.errors import InputError
from pictool.linker.policies.base import Knob, Needs, Policy, Prompt, Selection, first_rows


@dataclass(frozen=True)
class LegoLink(Policy):
    """LegoLink-k (EPIC §4.2): the first k tokens of every chunk but the head, which disarms their attention sinks.

    Static, O(kN). k at least the longest chunk is full.

    Fields:
        k: tokens at the beginning of every chunk but the head that are recomputed.
    """

    name: ClassVar[str] = "legolink"
    reference: ClassVar[str] = "EPIC §4.2"
    knob: ClassVar[Knob | None] = Knob("k")
    k: int = 16

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"legolink: k={self.k} must be 1 or more; EPIC's LegoLink-0 is naive with --after head")

    @property
    def needs(self) -> Needs:
        return Needs(is_local=True, cut=self.k)

    def select(self, prompt: Prompt) -> Selection:
        return Selection(first_rows(prompt.layout, self.k))
