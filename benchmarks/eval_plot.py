"""The quality–TTFT picture of `pic eval --json` (EPIC, fig. 6): every policy a point, the Pareto front a line.

python -m benchmarks.eval_plot benchmarks/results/eval_world.json docs/images/eval-world
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import PlotStyle, picture, picture_text, plot_style

Line = Mapping[str, Any]  # of the table of `pic eval`


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (cost, quality) those that no other point beats (costs no more, and is better); ascending."""
    front: list[tuple[float, float]] = []
    for cost, quality in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or quality > front[-1][1]:
            front.append((cost, quality))
    return front


def colours(styles: Sequence[PlotStyle]) -> list[Any]:
    """A colour for each line. Lines of one style take shades of its colour map, later ones darker shades."""
    from matplotlib import colormaps

    seen, chosen = Counter[PlotStyle](), list[Any]()
    for style in styles:
        if style.colors.startswith("#"):
            chosen.append(style.colors)
        else:
            count = styles.count(style)
            chosen.append(colormaps[style.colors](0.9 if count == 1 else 0.4 + 0.55 * seen[style] / (count - 1)))
        seen[style] += 1
    return chosen


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the table of an evaluation."""
    lines: Sequence[Line] = summary["lines"]
    styles = [plot_style(line["algo"]) for line in lines]
    points = [(1e3 * line["timing"]["ttft_s"], line["score"]["mean"]) for line in lines]
    with picture(path, 7.5, 5.0) as figure:
        axes = figure.add_subplot()
        for line, (x, y), style, colour in zip(lines, points, styles, colours(styles), strict=True):
            score = line["score"]
            low, high = (y if score[end] is None else score[end] for end in ("low", "high"))
            axes.vlines(x, low, high, colors=[colour], linewidth=1.2, alpha=0.5)
            axes.plot(
                [x], [y], marker=style.marker, markersize=style.size, color=colour, markeredgecolor="#1a1a1a",
                markeredgewidth=0.4, linestyle="none", zorder=3, label=picture_text(line["label"]),
            )  # fmt: skip
        front = zip(*pareto_front(points), strict=True)
        axes.plot(*front, color="#bbbbbb", linewidth=1.2, linestyle="--", zorder=1, label="Pareto front")
        axes.margins(x=0.12, y=0.08)
        axes.set(xlabel="time to first token, ms (median)", ylabel=f"{summary['metric']} (mean, 95 % interval)")
        model = summary["header"]["model"]["name"]
        title = f"{summary['title']}, {summary['questions']} questions, {model}"
        axes.set_title(picture_text(title), fontsize=10, loc="left")
        axes.legend(loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, help="what pic eval --json printed")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    plot(json.loads(options.summary.read_text()), options.picture)


if __name__ == "__main__":
    main()
