from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pictool.errors import InputError
from pictool.linker.policies.base import Needs, Policy, Prompt, Selection, all_rows


@dataclass(frozen=True)
class Prefix(Policy):
    """Prefix caching (as vLLM's, by hashes of blocks): every row after the longest stored beginning.

    Exact: a block is reused only after the very tokens after which it was computed, and all else is computed. What
    was computed is stored, so that the next prompt with the same beginning reuses more.

    Fields:
        block: tokens of a block; only whole blocks are stored.
    """

    name: ClassVar[str] = "prefix"
    reference: ClassVar[str] = "vLLM, automatic prefix caching"
    block: int = 16

    def __post_init__(self) -> None:
        if self.block < 1:
            raise InputError(f"prefix: block={self.block} must be 1 or more")

    @property
    def needs(self) -> Needs:
        return Needs(objects=False, chain_block=self.block)

    def select(self, prompt: Prompt) -> Selection:
        rows = all_rows(prompt.layout)
        rows[: prompt.cached] = False
        return Selection(rows)
