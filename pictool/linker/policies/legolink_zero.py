from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pictool.errors import InputError
from pictool.linker.policies.base import Needs, Policy, Prompt, Selection, no_rows


@dataclass(frozen=True)
class LegoLinkZero(Policy):
    """LegoLink-0 (EPIC §5.4): no row; documents are compiled after s dummy tokens, whose KV is dropped.

    The dummies take the attention sink with them. Objects that were compiled without them can be linked too (they
    then behave as under naive).

    Fields:
        s: dummy tokens (BOS) before documents that are compiled for this policy.
    """

    name: ClassVar[str] = "legolink-0"
    reference: ClassVar[str] = "EPIC §5.4"
    s: int = 4

    def __post_init__(self) -> None:
        if self.s < 1:
            raise InputError(f"legolink-0: s={self.s} must be 1 or more")

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.s, is_local=True)

    def select(self, prompt: Prompt) -> Selection:
        return Selection(no_rows(prompt.layout))
