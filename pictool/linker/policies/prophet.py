from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pictool.linker.policies.base import (
    Knob,
    Needs,
    Policy,
    Prompt,
    Ranking,
    Selection,
    all_rows,
    count_of,
    highest,
    no_rows,
    require_share,
    reused_rows,
)


@dataclass(frozen=True)
class Prophet(Policy):
    """ProphetKV (arXiv 2602.02579): the tokens of the context that the question looks at.

    Stage one computes the tail over what is stored, and scores each token of the chunks by the attention that it gets:
    the highest of the heads, summed over the tail's rows and the layers; layers with a window and without count alike,
    in sum (`linker/attended.py`). Stage two computes the ⌈r · N⌉ highest, and
    the tail once more, at all layers. Static for stage two.

    Fields:
        ratio: r, the share of context rows that are computed at every layer.
    """

    name: ClassVar[str] = "prophet"
    reference: ClassVar[str] = "ProphetKV, arXiv 2602.02579"
    knob: ClassVar[Knob | None] = Knob("ratio", is_share=True)
    ratio: float = 0.10

    def __post_init__(self) -> None:
        require_share(self.name, "ratio", self.ratio)

    @property
    def needs(self) -> Needs:
        return Needs(attention=0 < self.ratio < 1)

    def select(self, prompt: Prompt) -> Selection:
        if not self.needs.attention:
            return Selection(all_rows(prompt.layout) if self.ratio else no_rows(prompt.layout))
        scores, reused = prompt.attention(on_host=False), reused_rows(prompt.layout)
        count = count_of(self.ratio, len(scores))
        if not isinstance(scores, np.ndarray):
            return Selection(reused, ranking=Ranking(scores, count))
        chosen = highest(np.where(reused, scores, -1), count)
        return Selection(chosen & reused, scores)
