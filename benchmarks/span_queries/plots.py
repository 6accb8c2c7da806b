"""Pictures of `python -m benchmarks.span_queries`, each as SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pictures import picture, picture_text
from benchmarks.span_queries.documents import STOCK
from benchmarks.span_queries.moves import LINK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.span_queries.bulk import BulkResult
    from benchmarks.span_queries.documents import DocumentsPoint
    from benchmarks.span_queries.judge import JudgePoint, JudgeResult
    from benchmarks.span_queries.moves import MovesPoint
    from benchmarks.span_queries.pool import PoolPoint
    from benchmarks.span_queries.tree import TreePoint

_COLOURS = ("#555555", "#08519c", "#d94801", "#31a354", "#756bb1", "#e7298a", "#a6761d")
_MARKERS, _NEUTRAL = "osD^vPX", "#777777"
_TREE = {"flat": "-", "tree": ":", "extract": "--"}


def plot_documents(points: Sequence[DocumentsPoint], title: str, name: str | Path) -> None:
    """TTFT by documents, both logarithmic (fig. 13b), and the speedup."""
    with picture(name, 9.6, 3.8) as figure:
        left, right = figure.subplots(1, 2)
        counts = [point.documents for point in points]
        for index, first in enumerate(points[0].measured):
            own = [point.measured[index] for point in points]
            style = {"color": _COLOURS[(index + 1) // 2 if index else 0], "marker": _MARKERS[index], "markersize": 4}
            line = "--" if first.label.endswith("miss") else "-"
            left.plot(counts, [one.ttft.median * 1e3 for one in own], line, label=picture_text(first.label), **style)
            if first.label != STOCK:
                right.plot(counts, [one.speedup for one in own], line, **style)
        left.set_yscale("log")
        left.set_ylabel("TTFT, ms")
        right.set_ylabel("speedup over stock")
        _at_one(right)
        for axes in (left, right):
            _counts(axes, counts, "documents")
        figure.suptitle(picture_text(title), fontsize=10, x=0.01, ha="left")
        figure.legend(loc="outside right center")


def plot_judge(result: JudgeResult, middle: float, title: str, name: str | Path) -> None:
    """Speed-up of TTFT by temperature (fig. 14) and by fan-out with p1 to p99 (fig. 15)."""
    with picture(name, 9.6, 3.8) as figure:
        left, right = figure.subplots(1, 2)
        labels = [label for label in result.points[0].ttft if label != STOCK]
        fan_outs = sorted({point.fan_out for point in result.points})
        for index, label in enumerate(labels):
            colour = _COLOURS[index + 1]
            for fan_out, line in dict(zip((fan_outs[-1], fan_outs[0]), ("-", ":"), strict=False)).items():
                own = sorted((p for p in result.points if p.fan_out == fan_out), key=lambda point: point.temperature)
                left.plot(
                    [point.temperature for point in own], [point.speedup[label].p50 for point in own], line, marker="o",
                    markersize=4, color=colour, label=f"{picture_text(label)}, fan-out {fan_out}",
                )  # fmt: skip
            _spread(right, [p for p in result.points if p.temperature == middle], label, colour)
        left.set(xlabel="temperature of the inner calls", ylabel="speedup over stock, p50")
        right.set(ylabel=f"speedup over stock, p1 to p99, at {middle:g}")
        _at_one(left)
        right.set_yscale("log")
        right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        right.axhline(1, color="#555555", linewidth=1)
        figure.suptitle(picture_text(title), fontsize=10, x=0.01, ha="left")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")


def _spread(axes: Axes, points: Sequence[JudgePoint], label: str, colour: str) -> None:
    own = sorted(points, key=lambda point: point.fan_out)
    counts = [point.fan_out for point in own]
    axes.plot(counts, [point.speedup[label].p50 for point in own], marker="o", markersize=4, color=colour)
    low, high = [point.speedup[label].p1 for point in own], [point.speedup[label].p99 for point in own]
    axes.fill_between(counts, low, high, color=colour, alpha=0.15, lw=0)
    _counts(axes, counts, "fan-out")


def plot_moves(points: Sequence[MovesPoint], title: str, name: str | Path) -> None:
    """Tokens a millisecond by how many are moved at once (fig. 13a), a panel for each kind of moves."""
    kinds = list(dict.fromkeys(point.kind for point in points if point.kind != LINK))
    with picture(name, 3.2 * len(kinds) + 1.2, 3.6) as figure:
        every = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
        for axes, kind in zip(every, kinds, strict=True):
            for index, batch in enumerate(sorted({point.batch for point in points if point.kind != LINK})):
                own = [point for point in points if (point.kind, point.batch) == (kind, batch)]
                axes.plot(
                    [point.tokens for point in own], [point.tokens_per_ms.median for point in own],
                    color=_COLOURS[index], marker=_MARKERS[index], markersize=4,
                    label=f"batches of {batch}" if axes is every[0] else None,
                )  # fmt: skip
            link = [point for point in points if point.kind == LINK]
            axes.plot(
                [point.tokens for point in link], [point.tokens_per_ms.median for point in link], "--",
                color=_NEUTRAL, label="a link's copy" if axes is every[0] else None,
            )  # fmt: skip
            _counts(axes, [point.tokens for point in link], "tokens moved")
            axes.set_title(kind)
            axes.set_ylim(bottom=0)
        every[0].set_ylabel("tokens/ms")
        figure.suptitle(picture_text(title), fontsize=10, x=0.01, ha="left")
        figure.legend(loc="outside right center")


def plot_pool(points: Sequence[PoolPoint], title: str, name: str | Path) -> None:
    """TTFT by stream and by where objects come from, a panel for each policy."""
    labels = list(dict.fromkeys(point.label for point in points))
    with picture(name, 7.6, 3.2) as figure:
        every = figure.subplots(1, len(labels), squeeze=False)[0]
        for axes, label in zip(every, labels, strict=True):
            own = [point for point in points if point.label == label]
            places = list(own[0].ttft)
            for index, place in enumerate(places):
                at = [row + 0.27 * (index - 1) for row in range(len(own))]
                times = [point.ttft[place].median * 1e3 for point in own]
                axes.bar(at, times, 0.25, color=_COLOURS[index], label=place if label == labels[0] else None)
            axes.set_xticks(range(len(own)), [point.stream for point in own])
            axes.set_title(picture_text(label))
        every[0].set_ylabel("TTFT, ms")
        figure.suptitle(picture_text(title), fontsize=10, x=0.01, ha="left")
        figure.legend(loc="outside right center")


def plot_bulk(result: BulkResult, title: str, name: str | Path) -> None:
    """Bars of speed-up by policy and size of bulk (table 4)."""
    rows = [row for row in result.rows if row.label != STOCK]
    with picture(name, 6.4, 1.2 + 0.35 * len(rows)) as figure:
        axes = figure.subplots()
        labels = list(dict.fromkeys(row.label for row in rows))
        for at, row in enumerate(rows):
            axes.barh(at, row.speedup.median, color=_COLOURS[labels.index(row.label) + 1], height=0.7)
            axes.annotate(f" {row.speedup.median:.2f}x, {row.hits:.0%} hits", (row.speedup.median, at), va="center")
        axes.set_yticks(range(len(rows)), [picture_text(f"{row.label}, bulks of {row.size or 'all'}") for row in rows])
        axes.invert_yaxis()
        axes.axvline(1, color="#555555", linewidth=1)
        axes.set_xlim(0, 1.35 * max(row.speedup.median for row in rows))
        axes.set_xlabel("speedup over a prefix cache (mean TTFT)")
        axes.set_title(picture_text(title), loc="left")


def plot_tree(points: Sequence[TreePoint], title: str, name: str | Path) -> None:
    """Right answers by the length of the hay (fig. 17)."""
    with picture(name, 7.6, 3.6) as figure:
        axes = figure.subplots()
        for index, label in enumerate(dict.fromkeys(point.label for point in points)):
            own = [point for point in points if point.label == label]
            for query, line in _TREE.items():
                axes.plot(
                    [point.hay for point in own], [100 * point.right[query] for point in own], line,
                    marker=_MARKERS[index], markersize=8 - 4 * min(index, 1), color=_COLOURS[index],
                    label=f"{query}, {picture_text(label)}",
                )  # fmt: skip
        axes.set(xlabel="tokens of hay around each candidate", ylabel="right answers, %", ylim=(-3, 103))
        axes.set_title(picture_text(title), loc="left")
        figure.legend(loc="outside right center")


def _counts(axes: Axes, counts: Sequence[int], what: str) -> None:
    """A logarithmic axis with a tick at each count."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
                             for count in counts])  # fmt: skip
    axes.xaxis.minorticks_off()
    axes.set_xlabel(what)


def _at_one(axes: Axes) -> None:
    """A line where nothing is gained."""
    axes.axhline(1, color="#555555", linewidth=1)
    axes.set_ylim(bottom=0)
