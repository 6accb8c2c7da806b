"""The quality–TTFT picture (EPIC, fig. 6): every algorithm a point, the Pareto front a line. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.eval.plot_labels import Mark, place_labels
from pictool.eval.summary import Line, Summary
from pictool.store.store import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (7.5, 5.0)  # inches
BLACK, GREY = "#1a1a1a", "#8a8a8a"


@dataclass(frozen=True)
class Family:
    """Algorithms of one idea: one marker, and a colour map whose shades tell its members apart."""

    marker: str
    colours: str  # of matplotlib's maps, or a colour
    size: float = 8.0


FAMILIES = {
    "full": Family("o", BLACK),
    "naive": Family("X", BLACK),
    "legolink": Family("*", "Blues", 13.0),
    "legolink-0": Family("*", BLACK, 13.0),  # as in the paper's figure
    "cacheblend": Family("s", "Oranges", 7.0),
    "speccache": Family("^", "Greens"),
    "mapreduce": Family("D", GREY, 6.5),
    "maprerank": Family("d", GREY),
}
OTHER = Family("P", "Purples")


def write_pareto(summary: Summary, path: Path) -> list[Path]:
    """Draw `path` as SVG and as PNG. Equal summaries give an equal SVG.

    Raises:
        StoreError: a file cannot be written.
    """
    import matplotlib

    written = []
    with matplotlib.rc_context({"svg.hashsalt": "pictool", "font.size": 9.0, "svg.fonttype": "path"}):
        figure = draw(summary)
        for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
            target = path.with_suffix(suffix)
            with atomic_write(target) as file:
                figure.savefig(file, format=suffix[1:], dpi=150, metadata=metadata)
            written.append(target)
    return written


def draw(summary: Summary) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line, style in zip(summary.lines, styles(summary.lines), strict=True):
        _draw_point(axes, line, style)
    _draw_front(axes, summary.lines)
    _dress(axes, summary)
    figure.draw_without_rendering()  # type: ignore[no-untyped-call]
    place_labels(axes, [_mark(line) for line in summary.lines])
    return figure


def _mark(line: Line) -> Mark:
    score = line.score
    low, high = (score.mean if end is None else end for end in (score.low, score.high))
    return Mark(ttft_ms(line), score.mean, low, high, line.label)


def ttft_ms(line: Line) -> float:
    return line.timing.ttft_s * 1e3


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (cost, quality) those that no other one beats: not dearer, and better; ascending."""
    front: list[tuple[float, float]] = []
    for cost, quality in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or quality > front[-1][1]:
            front.append((cost, quality))
    return front


def styles(lines: Sequence[Line]) -> list[tuple[Family, Any]]:
    """Family and colour of every line: later members of a family, with more rows, are darker."""
    from matplotlib import colormaps

    found: list[tuple[Family, Any]] = []
    for line in lines:
        family = FAMILIES.get(line.algo, OTHER)
        mates = [one.label for one in lines if FAMILIES.get(one.algo, OTHER) is family]
        if family.colours.startswith("#"):
            found.append((family, family.colours))
        else:
            shade = 0.9 if len(mates) == 1 else 0.4 + 0.55 * mates.index(line.label) / (len(mates) - 1)
            found.append((family, colormaps[family.colours](shade)))
    return found


def _draw_point(axes: Axes, line: Line, style: tuple[Family, Any]) -> None:
    (family, colour), mark = style, _mark(line)
    axes.vlines(mark.x, mark.low, mark.high, colors=[colour], linewidth=1.2, alpha=0.5, zorder=2)
    axes.plot(
        [mark.x], [mark.y], marker=family.marker, markersize=family.size, color=colour, markeredgecolor=BLACK,
        markeredgewidth=0.4, linestyle="none", zorder=3,
    )  # fmt: skip


def _draw_front(axes: Axes, lines: Sequence[Line]) -> None:
    front = pareto_front([(ttft_ms(line), line.score.mean) for line in lines])
    axes.plot(*zip(*front, strict=True), color="#bbbbbb", linewidth=1.2, linestyle="--", zorder=1, label="Pareto front")


def _dress(axes: Axes, summary: Summary) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())  # type: ignore[no-untyped-call]
    axes.margins(x=0.12, y=0.08)
    axes.grid(visible=True, which="major", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("time to first token, ms (median)")
    axes.set_ylabel(f"{summary.metric} (mean, 95 % interval)")
    axes.set_title(
        f"{summary.title}, {summary.questions} questions, {summary.header['model']['name']}", fontsize=10, loc="left"
    )
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), frameon=False, borderaxespad=0.2)
