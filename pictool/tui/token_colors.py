"""Colours of a trace's tokens and of its heat map: which numbers they show, and in which steps and styles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from pictool.trace.format import Trace
from pictool.trace.heatmap import ASCII_RAMP, VIRIDIS, step_style
from pictool.trace.labels import row_labels

if TYPE_CHECKING:
    from pictool.trace.analysis import TraceAnalysis

NUM_STEPS = 9
CURSOR = Style(reverse=True, bold=True, underline=True)
MATCH = Style(underline=True, bold=True, italic=True)
DIM = Style(dim=True)
BOLD = Style(bold=True)
# Marks in place of steps: which of several links computed a token. Each with its style in colour and without.
BY_ALL, HERE, ELSEWHERE = 10, 11, 12
_MARKS = {
    BY_ALL: (Style.parse("#ffffff on #2c728e"), Style(underline=True)),
    HERE: (Style.parse("#000000 on #fde725"), Style(reverse=True)),
    ELSEWHERE: (Style.parse("#ffffff on #440154"), Style(bold=True, italic=True)),
}
DEVIATION_MODES = ("kv", "attention-dev")


@dataclass(frozen=True)
class ColorBy:
    """The numbers that tokens are coloured by; a layer, head or row of None is the mean of all.

    Attributes:
        mode: "computed" (at how many layers a token was computed, or whether at one), "score" (the policy's score),
            "attention" (share of the attention of tail and answer), "kv" or "attention-dev" (deviation from full
            recompute of K and V, or of the tail's attention).
        row: of the attention map.
    """

    mode: str = "computed"
    layer: int | None = None
    head: int | None = None
    row: int | None = None


@dataclass(frozen=True)
class TokenColors:
    """Numbers of tokens, and how they are drawn.

    Attributes:
        values: float64 [tokens], nan where there is no number.
        steps: int8 [tokens], from 0 (plain) to 9.
        low, high: the numbers that the lightest and the heaviest colour mean.
        map: float64 [rows, tokens], the rows of the heat map. labels: of its rows.
        row: the row that `values` are of, or None if they are of all rows.
        unit: what a number is.
    """

    values: NDArray[np.float64]
    steps: NDArray[np.int8]
    low: float
    high: float
    map: NDArray[np.float64]
    labels: tuple[str, ...]
    row: int | None
    unit: str


def color_modes(trace: Trace, analysis: TraceAnalysis | None) -> tuple[str, ...]:
    """List the modes that a trace has numbers for."""
    modes = ["computed"] + ["score"] * (trace.scores is not None)
    if analysis is not None and analysis.attention is not None:
        modes.append("attention")
    if analysis is not None and analysis.deviation is not None:
        modes += DEVIATION_MODES
    return tuple(modes)


def token_colors(trace: Trace, analysis: TraceAnalysis | None, by: ColorBy) -> TokenColors:
    """Compute the colours of prompt and answer; the mode must be one of `color_modes`."""
    if by.mode == "score":
        return _by_score(trace)
    if by.mode == "attention":
        return _by_attention(trace, analysis, by)
    if by.mode in DEVIATION_MODES:
        return _by_deviation(trace, analysis, by)
    return _by_computed(trace, by)


def legend(colors: TokenColors, has_color: bool) -> Text:
    """Return the colours with the numbers that they mean."""
    line = Text(f"{colors.low:.3g} ", style="dim")
    for step in range(1, NUM_STEPS + 1):
        line.append("  " if has_color else str(step), style=token_style(step, has_color))
    return line.append(f" {colors.high:.3g}  {colors.unit}", style="dim")


def _by_computed(trace: Trace, by: ColorBy) -> TokenColors:
    """Colour by the number of layers, or by one layer. A token that was computed at any layer is never plain."""
    rows = trace.rows.astype(np.float64)
    high = float(len(rows)) if by.layer is None else 1.0
    values = _pad(trace, rows.sum(0) if by.layer is None else rows[by.layer])
    steps = np.ceil(np.nan_to_num(values) / high * NUM_STEPS).astype(np.int8)
    unit = "layers that computed it" if by.layer is None else f"computed at layer {by.layer}"
    return TokenColors(values, steps, 0.0, high, _pad(trace, rows), _layer_labels(trace), by.layer, unit)


def _by_score(trace: Trace) -> TokenColors:
    assert trace.scores is not None
    values = _pad(trace, np.where(np.isfinite(trace.scores), trace.scores, np.nan).astype(np.float64))
    known = values[np.isfinite(values)]
    low = float(known.min()) if len(known) else 0.0
    return _scale(values, values[None], ("score",), None, "the policy's score", low=low)


def _by_attention(trace: Trace, analysis: TraceAnalysis | None, by: ColorBy) -> TokenColors:
    assert analysis is not None and analysis.attention is not None
    attention = analysis.attention
    rows = attention.share(by.layer, by.head)
    values = _mean(rows) if by.row is None else rows[by.row]
    labels = tuple(row_labels(trace, attention))
    return _scale(_pad(trace, values), _pad(trace, rows), labels, by.row, "share of attention")


def _by_deviation(trace: Trace, analysis: TraceAnalysis | None, by: ColorBy) -> TokenColors:
    assert analysis is not None and analysis.deviation is not None
    deviation, is_kv = analysis.deviation, by.mode == "kv"
    rows = (deviation.kv.both if is_kv else deviation.attention.tokens).astype(np.float64)
    values = rows.mean(0) if by.layer is None else rows[by.layer]
    unit = "|d(K,V)| from full" if is_kv else "|d attention| from full"
    return _scale(_pad(trace, values), _pad(trace, rows), _layer_labels(trace), by.layer, unit)


def _scale(
    values: NDArray[np.float64], rows: NDArray[np.float64], labels: tuple[str, ...], row: int | None, unit: str,
    low: float = 0.0,
) -> TokenColors:  # fmt: skip
    """Divide the range from `low` to the maximum into tenths; the lowest tenth is plain."""
    known = values[np.isfinite(values)]
    high = float(known.max()) if len(known) else 0.0
    scaled = (np.nan_to_num(values, nan=low) - low) / (high - low or 1.0)
    steps = np.clip((scaled * (NUM_STEPS + 1) + 1e-9).astype(np.int8), 0, NUM_STEPS)
    return TokenColors(values, steps, low, high, rows, labels, row, unit)


def _mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average over the rows that have a number; nan where none has."""
    count = np.isfinite(rows).sum(0)
    return np.asarray(np.divide(np.nansum(rows, 0), count, out=np.full(len(count), np.nan), where=count > 0))


def _pad(trace: Trace, values: NDArray[Any]) -> NDArray[np.float64]:
    """Pad with nan to the width of prompt and answer."""
    num_missing = trace.layout.num_tokens + len(trace.generated) - values.shape[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, num_missing)], constant_values=np.nan)


def _layer_labels(trace: Trace) -> tuple[str, ...]:
    return tuple(f"layer {layer}" for layer in range(len(trace.rows)))


def cell_width(text: str) -> int:
    """Return how many cells a text takes."""
    return len(text) if text.isascii() else cell_len(text)


@cache
def token_style(step: int, has_color: bool) -> Style:
    """Return the style of a token's step, from 0 (plain) to 9, or of its mark."""
    if step in _MARKS:
        return _MARKS[step][0 if has_color else 1]
    if step <= 0:
        return Style.null()
    if has_color:
        return Style.parse(step_style(min(step, len(VIRIDIS)) - 1))
    return Style(underline=True, bold=step > 3, reverse=step > 6)


@cache
def map_cell(step: int, has_color: bool) -> tuple[str, Style]:
    """Return the character and style of a heat map's cell, for steps 0 to 8; a step below 0 is blank."""
    if step < 0:
        return " ", Style.null()
    return (" ", Style.parse(step_style(step))) if has_color else (ASCII_RAMP[step], Style.null())
