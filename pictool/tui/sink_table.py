"""A sink profile as a table: what the first tokens of an object draw, in percent. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pictool.tui.widgets.table import Column

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pictool.trace.sinks import SinkProfile

OFFSETS = 12  # of the chunk's tokens, each in a column
_BAR = 10


def sink_columns(has_dummies: bool) -> list[Column]:
    """Shares in percent. Without dummy tokens their column takes no room."""
    return [
        Column("layer", 5, True), Column("head", 4, True), Column("first", 5, True), Column("", _BAR),
        Column("dummies", 7 if has_dummies else -1, True),
        *(Column(f"t{offset}", 4, True) for offset in range(OFFSETS)),
    ]  # fmt: skip


def sinks_line(profile: SinkProfile) -> str:
    """The mean, and what it would be if all tokens drew alike."""
    drawn = f"the first {profile.first} tokens draw {100 * profile.share.mean():.1f} % of the attention"
    return f"{drawn} of the {profile.num_rows} behind ({100 * profile.if_even:.1f} if all drew alike)"


def sink_rows(profile: SinkProfile) -> list[tuple[str, ...]]:
    """The mean of all, then every layer and head: the first tokens together, the dummies, each of the first tokens."""
    layers, heads = profile.share.shape
    rows = [("all", "", *_numbers(profile.share.mean(), profile.dummies.mean(), profile.by_offset.mean((0, 1))))]
    for layer in range(layers):
        for head in range(heads):
            at = layer, head
            rows.append(
                (str(layer), str(head), *_numbers(profile.share[at], profile.dummies[at], profile.by_offset[at]))
            )
    return rows


def _numbers(share: float, dummies: float, offsets: NDArray[np.float64]) -> tuple[str, ...]:
    shown = [f"{100 * one:.1f}" for one in offsets[:OFFSETS]]
    bar = "█" * round(share * _BAR)
    return f"{100 * share:.1f}", bar, f"{100 * dummies:.1f}", *shown, *[""] * (OFFSETS - len(shown))
