"""The pictures of `pic estimate --plot`: what is reused over time, and by the size of a cache. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pictool.trace.labels import picture_text
from pictool.trace.plots import WIDTH, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pictool.estimate.report import Report

_BARS = 48
_COLOURS = {"prefix": "#9ecae1", "linkable": "#31a354", "new": "#bdbdbd"}


def write(report: Report, name: str | Path) -> list[Path]:
    """Write the picture as SVG and as PNG.

    Raises:
        StoreError: a file cannot be written.
    """
    figure = draw(report)
    paths = [Path(name).with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in paths:
        save(figure, path)
    return paths


@styled
def draw(report: Report) -> Figure:
    """Stacked bars over time, or over requests where the log has no times; and the curve of capacities."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    over_time, curve = figure.subplots(1, 2)
    _bars(over_time, np.asarray(report.measure.series, dtype=np.float64).reshape(-1, 5))
    _curve(curve, report)
    figure.suptitle(picture_text(report.verdict()), fontsize=8)
    return figure


def _bars(axes: Axes, rows: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    has_times = bool(np.isfinite(rows[:, 0]).all())
    places = (rows[:, 0] - rows[:, 0].min()) / 3600 if has_times else np.arange(len(rows), dtype=np.float64)
    edges = np.linspace(0, max(float(places.max()), 1e-9), min(_BARS, len(rows)) + 1)
    which = np.clip(np.digitize(places, edges) - 1, 0, len(edges) - 2)
    parts = {"prefix": rows[:, 2], "linkable": rows[:, 3], "new": rows[:, 1] - rows[:, 2] - rows[:, 3]}
    bottom = np.zeros(len(edges) - 1)
    for label, tokens in parts.items():
        sums = np.bincount(which, tokens, len(bottom))
        axes.bar(edges[:-1], sums, np.diff(edges), bottom, align="edge", color=_COLOURS[label], label=label)
        bottom += sums
    axes.set(xlabel="hours" if has_times else "requests", ylabel="tokens")
    axes.legend(fontsize=7)


def _curve(axes: Axes, report: Report) -> None:
    points = report.curve()
    total = report.totals.tokens.total or 1.0
    sizes = [capacity * report.size.kv_bytes / 1e9 for capacity, _, _ in points]
    axes.plot(sizes, [1 - prefix / total for _, prefix, _ in points], label="prefix", marker=".")
    axes.plot(sizes, [1 - (linked + report.totals.tokens.prefix) / total for *_, linked in points],
              label="prefix and documents", marker=".")  # fmt: skip
    axes.set(xscale="log", xlabel=f"GB of KV ({picture_text(report.size.name)})", ylabel="miss ratio", ylim=(0, 1))
    axes.legend(fontsize=7)
