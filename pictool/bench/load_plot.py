"""The picture of `pic bench async`: TTFT, throughput and goodput by rate (EPIC fig. 8, SpecCache fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.bench.asynchronous import Point
from pictool.bench.plot import colours, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, LEGEND_WIDTH, HEIGHT = 3.6, 1.8, 3.6  # inches, of a panel
OFFERED, NEUTRAL = "#bbbbbb", "#777777"
LINES = ("-", "--", ":", "-.")  # by user set
MARKERS = "osD^vP*Xd"  # by policy
PANELS = {
    "ttft_mean_s": "mean time to first token, s",
    "throughput": "throughput, requests/s",
    "goodput": "goodput, good answers/s",
}


def plot_load(points: Sequence[Point], title: str, name: str | Path) -> None:
    """A panel for each of TTFT, throughput and (where there are scores) goodput; bars are standard deviations."""
    with picture(name, WIDTH * len(panels_of(points)) + LEGEND_WIDTH, HEIGHT) as figure:
        draw_load(figure, points, title)


def panels_of(points: Sequence[Point]) -> list[str]:
    """What there are numbers of."""
    return [name for name in PANELS if any(point.mean(name) is not None for point in points)]


def draw_load(figure: Figure, points: Sequence[Point], title: str) -> None:
    styles, panels = _styles(points), panels_of(points)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel, points, styles)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.legend(handles=_legend(points, styles), loc="outside right center")


def series(points: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    """Points by policy and number of users, each by ascending rate."""
    found: dict[tuple[str, int], list[Point]] = {}
    for point in sorted(points, key=lambda one: one.rate):
        found.setdefault((point.label, point.users), []).append(point)
    return found


def _styles(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every policy."""
    chosen = colours(list(dict.fromkeys(point.label for point in points)))
    return {
        label: {"color": colour, "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5}
        for i, (label, colour) in enumerate(chosen.items())
    }


def _draw_panel(axes: Axes, name: str, points: Sequence[Point], styles: Mapping[str, dict[str, Any]]) -> None:
    users = sorted({point.users for point in points})
    for (label, count), line in series(points).items():
        known = [(point, mean) for point in line if (mean := point.mean(name)) is not None]
        axes.errorbar(
            [point.rate for point, _ in known], [mean for _, mean in known],
            yerr=[point.deviation(name) or 0.0 for point, _ in known],
            linestyle=_line(users.index(count)), capsize=2, linewidth=1.3, **styles[label],
        )  # fmt: skip
    top = max(point.rate for point in points)
    if name == "ttft_mean_s":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1)
        axes.plot([0, top], [0, top], color=OFFERED, linewidth=1, zorder=1)
    axes.set_xlim(0, 1.04 * top)
    axes.set(xlabel="requests/s that arrive", ylabel=PANELS[name])


def _legend(points: Sequence[Point], styles: Mapping[str, dict[str, Any]]) -> list[Any]:
    """Policies by colour and marker; user sets, if there are several, by line; the rate that arrives."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in styles.items()]
    sets = {point.users: _set_name(point) for point in sorted(points, key=lambda one: one.users)}
    if len(sets) > 1:
        lines = enumerate(sets.values())
        handles += [Line2D([], [], color=NEUTRAL, linestyle=_line(i), label=name) for i, name in lines]
    return [*handles, Line2D([], [], color=OFFERED, linewidth=1, label="all that arrives")]


def _set_name(point: Point) -> str:
    ratio = "" if point.ccr is None else f", CCR {point.ccr:.2g}"
    return f"{point.users} user{'s' if point.users > 1 else ''}{ratio}"


def _line(number: int) -> Any:
    return LINES[number % len(LINES)]
