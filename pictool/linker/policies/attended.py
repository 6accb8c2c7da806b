from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pictool.core import Layout
from pictool.errors import InputError
from pictool.linker.policies.base import (
    Knob,
    Needs,
    PlotStyle,
    Policy,
    Prompt,
    Scores,
    Selection,
    count_of,
    highest,
    require_share,
)


@dataclass(frozen=True)
class Attended(Policy):
    """Attended-r (docs/studies/fixups.md): the tokens to which the tail attends most over naive reuse.

    The tail's rows are computed once more than otherwise, over KV as it is reused; no second model is needed.
    Static: all is chosen before layer 0 of the link proper.

    Fields:
        ratio: r; the ⌈r·N⌉ tokens of chunks to which the tail attends most are recomputed.
    """

    name: ClassVar[str] = "attended"
    reference: ClassVar[str] = "docs/studies/fixups.md"
    plot: ClassVar[PlotStyle] = PlotStyle("o", "Greys")
    knob: ClassVar[Knob | None] = Knob("ratio", is_share=True)
    ratio: float = 0.10

    def __post_init__(self) -> None:
        require_share(self.name, "ratio", self.ratio)

    @property
    def needs(self) -> Needs:
        return Needs(attention=True)

    def select(self, prompt: Prompt) -> Selection:
        scores = attention_of(prompt, self.name)
        rows = highest(scores, count_of(self.ratio, len(scores))) & ~exact_rows(prompt.layout)
        return Selection(rows, scores)


def attention_of(prompt: Prompt, policy: str) -> Scores:
    """How much the tail attends to every context token: the most over its rows, heads and layers; float32 [N].

    Tokens whose KV is exact have 0.

    Raises:
        InputError: the engine does not measure it.
    """
    if prompt.attention is None:
        raise InputError(
            f"{policy}: reads what the tail attends to over naive reuse, which this engine does not measure; take the "
            "torch engine, or another policy"
        )
    most: Scores = prompt.attention.max(0)
    return np.where(exact_rows(prompt.layout), np.float32(0), most)


def exact_rows(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """bool [N]: the head; with an empty one the first chunk."""
    rows = np.zeros(layout.num_context, dtype=bool)
    rows[: layout.head[1] or (layout.chunks[0][1] if layout.chunks else 0)] = True
    return rows
