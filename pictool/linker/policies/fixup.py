from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pictool.core import RowMask
from pictool.errors import InputError
from pictool.linker.policies.base import (
    Knob,
    Needs,
    Policy,
    Prompt,
    Scores,
    Selection,
    count_of,
    first_rows,
    highest,
    require_share,
)

BUDGETS = ("prompt", "chunk", "auto")
FALLBACKS = ("none", "legolink")
FALLBACK_K = 16  # LegoLink's default


@dataclass(frozen=True)
class Fixup(Policy):
    """Fixup-r (docs/studies/fixups.md): the tokens whose KV depends most on what precedes their chunk, by its table.

    Static: the tables were measured when the chunks were compiled (`pic compile --probes`). The head is exact, and so
    is the first chunk after an empty head.

    Fields:
        ratio: r; the ⌈r·N⌉ tokens with the highest scores are recomputed.
        budget: ``prompt``: the highest scores of the whole prompt (of a hybrid as ``chunk``, so that a chunk's stored
            runs, and their states, are the same in every prompt); ``chunk``: the highest ⌈r·n_c⌉ of every chunk;
            ``auto``: every token whose score is above `threshold`, so that independent documents cost next to nothing.
        threshold: the score that ``auto`` asks for.
        first: tokens at the beginning of every chunk that are recomputed in addition, as LegoLink does.
        fallback: ``legolink`` computes the first 16 tokens of chunks whose object has no table, ``none`` refuses these.
    """

    name: ClassVar[str] = "fixup"
    reference: ClassVar[str] = "docs/studies/fixups.md"
    knob: ClassVar[Knob | None] = Knob("ratio", is_share=True)
    ratio: float = 0.10
    budget: str = "prompt"
    threshold: float = 0.75
    first: int = 0
    fallback: str = "none"

    def __post_init__(self) -> None:
        require_share(self.name, "ratio", self.ratio)
        for field, known in (("budget", BUDGETS), ("fallback", FALLBACKS)):
            if getattr(self, field) not in known:
                raise InputError(f"fixup: {field}={getattr(self, field)!r} must be one of {', '.join(known)}")
        for field in ("threshold", "first"):
            if not getattr(self, field) >= 0:
                raise InputError(f"fixup: {field}={getattr(self, field)} must be 0 or more")

    @property
    def needs(self) -> Needs:
        return Needs(tables=True, all_tables=self.fallback != "legolink")

    def select(self, prompt: Prompt) -> Selection:
        layout = prompt.layout
        scores = np.full(layout.num_context, -np.inf, dtype=np.float32)
        rows = first_rows(layout, self.first)
        chunks = list(zip(prompt.texts[1:-1], layout.chunks, prompt.tables, strict=True))
        for text, (start, end), table in chunks if layout.head[1] else chunks[1:]:
            if table is not None:
                scores[start:end] = table
            elif self.fallback == "legolink":
                rows[start : min(start + FALLBACK_K, end)] = True
            else:
                raise without_table(str(text), start)
        by_chunk = self.budget == "chunk" or (self.budget == "prompt" and prompt.model.geometry.states is not None)
        rows |= self._chosen(scores, [span for _, span, _ in chunks] if by_chunk else [])
        return Selection(rows, np.where(np.isfinite(scores), scores, np.float32(0)))

    def _chosen(self, scores: Scores, chunks: list[tuple[int, int]]) -> RowMask:
        """Which tokens [N] the budget reaches, that of each chunk if there are any; those of score -inf never are."""
        has_score = np.isfinite(scores)
        if self.budget == "auto":
            return has_score & (scores > self.threshold)
        if not chunks:
            return has_score & highest(scores, count_of(self.ratio, len(scores)))
        chosen = np.zeros(len(scores), dtype=bool)
        for start, end in chunks:
            chosen[start:end] = highest(scores[start:end], count_of(self.ratio, end - start))
        return has_score & chosen


def without_table(text: str, start: int) -> InputError:
    """The error that an object has no table: that of a text, which starts at a token."""
    begin = " ".join(text.split())[:40]
    which = f'of "{begin}…"' if begin else f"at token {start}"
    return InputError(
        f"fixup: the object {which} has no table of fixups; compile it with pic compile --probes 8, or take "
        "--algo fixup:fallback=legolink"
    )
