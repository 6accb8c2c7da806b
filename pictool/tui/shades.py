"""What colours a trace's tokens and its map: numbers per token and per row, from frozen results. Pure numpy.

A shade is complete: its numbers, what they mean, and the step (0: plain, 1 to 9) that each token is drawn with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pictool.trace.format import Trace
from pictool.trace.labels import row_labels

if TYPE_CHECKING:
    from pictool.trace.analysis import Look
    from pictool.trace.attention import AttentionMap

STEPS = 9
# Name → whether it needs the model, and what it is.
MODES = {
    "computed": "whether, or at how many layers, a token was computed",
    "score": "what the policy chose by (min-max over the prompt)",
    "attention": "share of the attention of tail and answer (model)",
    "minmax": "QK scaled to 0..1 by row, as in EPIC fig. 4 (model)",
    "kv": "deviation of K and V from full recompute (model)",
    "attention-dev": "deviation of the tail's attention from full (model)",
}
_OF_ATTENTION, _OF_DEVIATION = ("attention", "minmax"), ("kv", "attention-dev")


@dataclass(frozen=True)
class Choice:
    """What is picked to be seen: None is the mean of all."""

    mode: str = "computed"
    layer: int | None = None
    head: int | None = None
    row: int | None = None


@dataclass(frozen=True)
class Shade:
    """Numbers of tokens, and how they are drawn.

    Attributes:
        values: float64 [tokens]; nan where there is none. least, most: what the lightest and the heaviest mean.
        steps: int8 [tokens], 0 (plain) to 9.
        map: float64 [rows, tokens], with labels; the row that `values` is of, or None if it is of all.
        unit: what a number is.
    """

    values: NDArray[np.float64]
    steps: NDArray[np.int8]
    least: float
    most: float
    map: NDArray[np.float64]
    labels: tuple[str, ...]
    row: int | None
    unit: str


def modes_of(trace: Trace, look: Look | None) -> tuple[str, ...]:
    """What can be shown of a trace now."""
    found = ["computed"] + ["score"] * (trace.scores is not None)
    if look is not None and look.attention is not None:
        found += _OF_ATTENTION
    if look is not None and look.against is not None:
        found += _OF_DEVIATION
    return tuple(found)


def shade_of(trace: Trace, look: Look | None, choice: Choice) -> Shade:
    """The shade of a choice; the mode must be one of `modes_of`."""
    if choice.mode == "score":
        return _score(trace)
    if choice.mode in _OF_ATTENTION:
        return _attention(trace, look, choice)
    if choice.mode in _OF_DEVIATION:
        return _deviation(trace, look, choice)
    return _computed(trace, choice)


def sinks_of(seen: AttentionMap, choice: Choice, first: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the first tokens of the head and of each chunk draw of the chosen layer, head and row (None: the mean of
    all), and what they would draw if all drew alike; float64 [chunks + 1] each.
    """
    layer = slice(None) if choice.layer is None else [seen.layers.index(choice.layer)]
    head = slice(None) if choice.head is None else [choice.head]
    row = slice(None) if choice.row is None else [choice.row]
    drawn = seen.initial(first)[layer][:, head][:, :, row]
    return drawn.mean((0, 1, 2)), seen.initial_if_even(first)[row].mean(0)


def _computed(trace: Trace, choice: Choice) -> Shade:
    """At how many layers (all), or whether at one. A token computed at any layer is never plain."""
    rows = trace.rows.astype(np.float64)
    most = float(len(rows)) if choice.layer is None else 1.0
    values = rows.sum(0) if choice.layer is None else rows[choice.layer]
    padded = _padded(trace, values)
    steps = np.ceil(np.nan_to_num(padded) / most * STEPS).astype(np.int8)
    unit = "layers that computed it" if choice.layer is None else f"computed at layer {choice.layer}"
    return Shade(padded, steps, 0.0, most, _padded(trace, rows), _layers(trace), choice.layer, unit)


def _score(trace: Trace) -> Shade:
    assert trace.scores is not None
    values = _padded(trace, np.where(np.isfinite(trace.scores), trace.scores, np.nan).astype(np.float64))
    return _scaled(values, values[None], ("score",), None, "the policy's score", least=_least(values))


def _attention(trace: Trace, look: Look | None, choice: Choice) -> Shade:
    assert look is not None and look.attention is not None
    seen = look.attention
    is_share = choice.mode == "attention"
    found = (seen.share if is_share else seen.scaled)(choice.layer, choice.head)
    values = _mean(found) if choice.row is None else found[choice.row]
    unit = "share of attention" if is_share else "QK, 0..1 by row"
    most = None if is_share else 1.0
    labels = tuple(row_labels(trace, seen))
    return _scaled(_padded(trace, values), _padded(trace, found), labels, choice.row, unit, most=most)


def _deviation(trace: Trace, look: Look | None, choice: Choice) -> Shade:
    assert look is not None and look.against is not None
    is_kv = choice.mode == "kv"
    found = (look.against.kv.both if is_kv else look.against.attention.tokens).astype(np.float64)
    values = found.mean(0) if choice.layer is None else found[choice.layer]
    unit = "|d(K,V)| from full" if is_kv else "|d attention| from full"
    return _scaled(_padded(trace, values), _padded(trace, found), _layers(trace), choice.layer, unit)


def _scaled(
    values: NDArray[np.float64], rows: NDArray[np.float64], labels: tuple[str, ...], row: int | None, unit: str,
    least: float = 0.0, most: float | None = None,
) -> Shade:  # fmt: skip
    """Steps of a tenth of the way from the least to the most; under the first one a token is plain."""
    known = values[np.isfinite(values)]
    top = most if most is not None else float(known.max()) if len(known) else 0.0
    level = (np.nan_to_num(values, nan=least) - least) / (top - least or 1.0)
    steps = np.clip((level * (STEPS + 1) + 1e-9).astype(np.int8), 0, STEPS)
    return Shade(values, steps, least, top, rows, labels, row, unit)


def _least(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(known.min()) if len(known) else 0.0


def _mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the rows that have a number; nan where none has."""
    count = np.isfinite(rows).sum(0)
    return np.asarray(np.divide(np.nansum(rows, 0), count, out=np.full(len(count), np.nan), where=count > 0))


def _padded(trace: Trace, values: NDArray[Any]) -> NDArray[np.float64]:
    """As wide as prompt and answer; nan where there is no number."""
    total = trace.layout.num_tokens + len(trace.generated)
    missing = total - values.shape[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)], constant_values=np.nan)


def _layers(trace: Trace) -> tuple[str, ...]:
    return tuple(f"layer {layer}" for layer in range(len(trace.rows)))
