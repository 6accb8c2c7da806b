"""The picture: a front that nothing beats, labels that can be read, and the same bytes every time."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pictool.eval.algorithms import plot_style
from pictool.eval.methods import Times
from pictool.eval.plot import draw, pareto_front, styles, write_pareto
from pictool.eval.statistics import Estimate
from pictool.eval.summary import Line, Summary
from pictool.linker.policies.base import PlotStyle

pytest.importorskip("matplotlib")

LABELS = ("full", "naive", "cacheblend-5", "cacheblend-15", "legolink-0", "legolink-2", "legolink-16", "speccache-15",
          "mapreduce", "new-one")  # fmt: skip
STYLES = {  # marker, colours, size
    "full": ("o", "#1a1a1a", 8.0), "naive": ("X", "#1a1a1a", 8.0), "legolink": ("*", "Blues", 13.0),
    "legolink-0": ("*", "#1a1a1a", 13.0), "cacheblend": ("s", "Oranges", 7.0), "speccache": ("^", "Greens", 8.0),
    "mapreduce": ("D", "#8a8a8a", 6.5), "maprerank": ("d", "#8a8a8a", 8.0),
}  # fmt: skip


def line(label: str, ttft_s: float, score: float, half: float | None = 0.05) -> Line:
    estimate = Estimate(score, None, None) if half is None else Estimate(score, score - half, score + half)
    algo = label if label in STYLES else label.rpartition("-")[0]
    return Line(
        label,
        algo,
        {},
        estimate,
        estimate,
        0,
        0,
        None,
        None,
        1,
        1,
        1,
        1,
        1,
        Times(ttft_s, 0, 0, 0, 0),
        1,
        None,
        None,
        0,
        {},
        {},
        {},
        None,
    )


def summary(lines: list[Line]) -> Summary:
    return Summary("world", "r.jsonl", {"model": {"name": "tiny"}}, "em", 100, 20, 100, (), {}, {}, 300.0, lines)


@pytest.fixture
def drawn() -> Summary:
    places = np.random.default_rng(0).random((len(LABELS), 2))
    return summary([line(label, 0.01 * 10**x, y) for label, (x, y) in zip(LABELS, places.tolist(), strict=True)])


def test_the_front_is_what_nothing_beats() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        points = [(float(x), float(y)) for x, y in draw.integers(0, 8, (12, 2))]
        free = {
            (x, y)
            for x, y in points
            if not any((a <= x and b >= y) and (a, b) != (x, y) for a, b in points)
        }  # fmt: skip
        assert pareto_front(points) == sorted(free)


def test_both_files_are_written_and_the_svg_is_the_same_every_time(drawn: Summary) -> None:
    assert write_pareto(drawn, Path("out/p.png")) == [Path("out/p.svg"), Path("out/p.png")]
    first = Path("out/p.svg").read_bytes()
    assert Path("out/p.png").read_bytes().startswith(b"\x89PNG")
    write_pareto(drawn, Path("out/p.svg"))
    assert Path("out/p.svg").read_bytes() == first and b"<dc:date>" not in first


def test_every_algorithm_has_its_point_and_its_label(drawn: Summary) -> None:
    axes = draw(drawn).axes[0]
    assert sorted(text.get_text() for text in axes.texts) == sorted(LABELS)
    points = [[float(np.asarray(values)[0]) for values in line.get_data()] for line in axes.lines]
    assert all([line.timing.ttft_s * 1e3, line.score.mean] in points for line in drawn.lines)
    assert axes.get_xscale() == "log"


def test_labels_cover_no_other_label(drawn: Summary) -> None:
    from matplotlib.text import Text

    close = [replace(each, timing=Times(0.02 + i / 2000, 0, 0, 0, 0)) for i, each in enumerate(drawn.lines)]
    for case in (drawn, summary(close), summary([line(label, 0.01, 0.5) for label in LABELS])):
        figure = draw(case)
        figure.canvas.draw()
        boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without the lines to their points
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_algorithms_have_their_styles_and_variants_their_shades() -> None:
    lines = [line(label, 1, 1) for label in LABELS]
    found = dict(zip(LABELS, styles(lines), strict=True))
    assert found["full"] == (plot_style("full"), "#1a1a1a") and found["new-one"][0] == PlotStyle()
    light, dark = found["legolink-2"][1], found["legolink-16"][1]
    assert light[2] == max(light[:3]) and sum(dark[:3]) < sum(light[:3])  # blue, and darker with more rows
    orange = found["cacheblend-5"][1]
    assert orange[0] > orange[1] > orange[2]
    for name, values in STYLES.items():
        style = plot_style(name)
        assert (style.marker, style.colors, style.size) == values


def test_a_single_point_and_no_intervals(drawn: Summary) -> None:
    write_pareto(summary([line("full", 0.01, 1.0, None)]), Path("one.svg"))
    write_pareto(summary([line(label, 0.01, 1.0, 0.0) for label in LABELS]), Path("same.svg"))
    assert re.search(r"<svg", Path("one.svg").read_text())
