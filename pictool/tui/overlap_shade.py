"""Which tokens each of several links computed, against the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from pictool.trace.format import Trace
from pictool.tui.widgets.inks import BY_ALL, ELSEWHERE, HERE, token_style

_NAMES = {BY_ALL: "by all", HERE: "here", ELSEWHERE: "elsewhere"}


def overlap_steps(traces: Sequence[Trace], layer: int | None) -> list[NDArray[np.int8]]:
    """A mark for each of the prompt's tokens [n], link by link; as `pic diff` counts: at a layer, or (None) at any."""
    computed = np.stack([one.rows.any(0) if layer is None else one.rows[layer] for one in traces])
    by_all, by_any = computed.all(0), computed.any(0)
    context = np.arange(computed.shape[1]) < traces[0].layout.num_context
    steps = np.where(computed, np.where(by_all, BY_ALL, HERE), np.where(by_any, ELSEWHERE, 0))
    return list(np.where(context, steps, 0).astype(np.int8))


def overlap_counts(steps: NDArray[np.int8]) -> str:
    """How many context tokens have each mark."""
    return ", ".join(f"{int((steps == mark).sum())} {name}" for mark, name in _NAMES.items())


def overlap_legend(has_color: bool) -> Text:
    """What the marks look like."""
    names = {BY_ALL: "by all", HERE: "here, not by all", ELSEWHERE: "elsewhere, not here"}
    line = Text().append("computed ", style="dim")
    for mark, name in names.items():
        line.append(name, style=token_style(mark, has_color)).append(" ")
    return line
