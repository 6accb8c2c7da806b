"""The picture of `pic tune`: the measure with its bounds over the share of rows, and the target. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pictool.eval.algorithms import plot_style
from pictool.eval.plot import write_picture
from pictool.trace.labels import picture_text
from pictool.tuning.search import TargetStatus
from pictool.tuning.tune import TuneLine, TuningResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (7.5, 4.5)  # inches
MEASURES = {
    "answer_kl": "KL of the whole answer to full, nats", "kl": "KL of the first token to full, nats",
    "left": "KL of the whole answer, less the share of naive's, nats",
    "differ": "share of answers that are not full's", "loss": "loss of answers",
}  # fmt: skip


def write_frontier(tuned: TuningResult, title: str, path: Path) -> list[Path]:
    """Draw `path` as SVG and as PNG.

    Raises:
        StoreError: a file cannot be written.
    """
    return write_picture(path, lambda: draw(tuned, title))


def draw(tuned: TuningResult, title: str) -> Figure:
    """A line for every policy over its ratios; what meets the target is filled, and what is chosen has a ring."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    by_algo: dict[str, list[TuneLine]] = {}
    for line in tuned.lines:
        by_algo.setdefault(line.algo, []).append(line)
    for algo, lines in by_algo.items():
        _draw_lines(axes, algo, lines, tuned.chosen)
    axes.axhline(tuned.target.zero, color="#555555", linewidth=1.0, linestyle="--", label="target")
    axes.set(
        title=picture_text(title), xlabel="context rows that are computed, %", ylabel=MEASURES[tuned.target.measure]
    )
    if tuned.target.measure in ("answer_kl", "kl"):
        axes.set_yscale("symlog", linthresh=tuned.target.limit)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _draw_lines(axes: Axes, algo: str, lines: list[TuneLine], chosen: str | None) -> None:
    style = plot_style(algo)
    color = style.line_colors[0] if not style.colors.startswith("#") else style.colors
    lines = sorted(lines, key=lambda line: line.rows)
    xs, ys = [100 * line.rows for line in lines], [line.finding.mean for line in lines]
    spans = [
        [max(0.0, line.finding.mean - line.finding.low) for line in lines],
        [max(0.0, line.finding.high - line.finding.mean) for line in lines],
    ]
    axes.errorbar(xs, ys, yerr=spans, color=color, linewidth=1.0, elinewidth=0.6, capsize=2, label=picture_text(algo))
    for x, y, line in zip(xs, ys, lines, strict=True):
        is_met = line.finding.status is TargetStatus.MEETS
        axes.plot(x, y, style.marker, color=color, markersize=5, markerfacecolor=color if is_met else "white")
        if line.label == chosen:
            axes.plot(x, y, "o", color="black", markersize=12, fillstyle="none")
