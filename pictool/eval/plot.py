"""The quality–TTFT picture (EPIC, fig. 6): every algorithm a point, the Pareto front a line. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.eval.algorithms import plot_style
from pictool.eval.plot_labels import Mark, place_labels
from pictool.eval.summary import Line, Summary
from pictool.linker.policies.base import PlotStyle
from pictool.store.store import atomic_write
from pictool.trace.labels import picture_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (7.5, 5.0)  # inches
EDGE = "#1a1a1a"  # of every marker


def write_pareto(summary: Summary, path: Path) -> list[Path]:
    """Draw `path` as SVG and as PNG. Equal summaries give an equal SVG.

    Raises:
        StoreError: a file cannot be written.
    """
    return write_picture(path, lambda: draw(summary))


def write_picture(path: Path, make_figure: Callable[[], Figure]) -> list[Path]:
    """Write a figure as SVG and as PNG: `path` with each suffix. Equal figures give an equal SVG.

    Raises:
        StoreError: a file cannot be written.
    """
    written = []
    with _style():
        figure = make_figure()
        for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
            target = path.with_suffix(suffix)
            with atomic_write(target) as file:
                figure.savefig(file, format=suffix[1:], dpi=150, metadata=metadata)
            written.append(target)
    return written


def _style() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "pictool", "font.size": 9.0, "svg.fonttype": "path"})


def svg_of(summary: Summary, by_rows: bool) -> bytes:
    """The picture as SVG."""
    file = io.BytesIO()
    with _style():
        draw(summary, by_rows).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def draw(summary: Summary, by_rows: bool = False) -> Figure:
    """Draw the picture, with all labels placed.

    Args:
        by_rows: the cost is the share of the context that is computed, which is about that of FLOPs, instead of TTFT.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marks = [_mark(line, 100 * line.row_share if by_rows else ttft_ms(line)) for line in summary.lines]
    for mark, (style, colour) in zip(marks, styles(summary.lines), strict=True):
        _draw_point(axes, mark, style, colour)
    front = pareto_front([(mark.x, mark.y) for mark in marks])
    axes.plot(*zip(*front, strict=True), color="#bbbbbb", linewidth=1.2, linestyle="--", zorder=1, label="Pareto front")
    _dress(axes, summary, by_rows)
    figure.draw_without_rendering()  # type: ignore[no-untyped-call]
    place_labels(axes, marks)
    return figure


def _mark(line: Line, cost: float) -> Mark:
    score = line.score
    low, high = (score.mean if end is None else end for end in (score.low, score.high))
    return Mark(cost, score.mean, low, high, picture_text(line.label))


def ttft_ms(line: Line) -> float:
    return line.timing.ttft_s * 1e3


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (cost, quality) those that no other point beats (costs no more, and is better); ascending."""
    front: list[tuple[float, float]] = []
    for cost, quality in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or quality > front[-1][1]:
            front.append((cost, quality))
    return front


def styles(lines: Sequence[Line]) -> list[tuple[PlotStyle, Any]]:
    """Style and colour of every line. Lines of one style take shades of its colour map, later ones darker shades."""
    from matplotlib import colormaps

    each = [plot_style(line.algo) for line in lines]
    coloured: list[tuple[PlotStyle, Any]] = []
    for i, style in enumerate(each):
        if style.colors.startswith("#"):
            coloured.append((style, style.colors))
        else:
            count, number = each.count(style), each[:i].count(style)
            coloured.append((style, colormaps[style.colors](0.9 if count == 1 else 0.4 + 0.55 * number / (count - 1))))
    return coloured


def _draw_point(axes: Axes, mark: Mark, style: PlotStyle, colour: Any) -> None:
    axes.vlines(mark.x, mark.low, mark.high, colors=[colour], linewidth=1.2, alpha=0.5, zorder=2)
    axes.plot(
        [mark.x], [mark.y], marker=style.marker, markersize=style.size, color=colour, markeredgecolor=EDGE,
        markeredgewidth=0.4, linestyle="none", zorder=3,
    )  # fmt: skip


def _dress(axes: Axes, summary: Summary, by_rows: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if not by_rows:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.12, y=0.08)
    axes.grid(visible=True, which="major", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("context rows that are computed, %" if by_rows else "time to first token, ms (median)")
    axes.set_ylabel(f"{summary.metric} (mean, 95 % interval)")
    axes.set_title(
        picture_text(f"{summary.title}, {summary.questions} questions, {summary.header['model']['name']}"),
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), frameon=False, borderaxespad=0.2)
