"""The picture of many users: which lines are drawn, and that equal numbers give an equal file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pictool.bench.asynchronous import Figures, Point
from pictool.bench.load_plot import draw_load, plot_load, series

pytest.importorskip("matplotlib")


def point(label: str, users: int, rate: float, goodput: float | None = None, ttft: Sequence[float] = (1, 3)) -> Point:
    runs = tuple(Figures(9, 1.0, seconds, 0, 0, 0, 0, rate / 2, goodput, 1.0) for seconds in ttft)
    return Point(label, label.split("-")[0], users, None if users == 1 else 0.1 * users, rate, runs)


POINTS = [point(label, users, rate) for rate in (4, 1, 2) for users in (1, 8) for label in ("full", "legolink-16")]


def test_a_line_is_a_policy_and_a_user_set_by_ascending_rate() -> None:
    found = series(POINTS)
    assert set(found) == {(label, users) for label in ("full", "legolink-16") for users in (1, 8)}
    assert all([one.rate for one in line] == [1, 2, 4] for line in found.values())


def drawn(points: Sequence[Point]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw_load(figure, points, "a title")
    figure.draw_without_rendering()
    return figure


def test_panels_show_means_with_deviations_against_the_rate() -> None:
    ttft, throughput = drawn(POINTS).axes
    assert ttft.get_yscale() == "log" and "time to first token" in ttft.get_ylabel()
    assert len(ttft.containers) == len(throughput.containers) == 4  # policies · user sets
    line, _, (bars,) = ttft.containers[0]
    assert line.get_xydata().tolist() == [[1, 2], [2, 2], [4, 2]]
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))
    assert throughput.containers[0][0].get_xydata().tolist() == [[1, 0.5], [2, 1], [4, 2]]


def test_goodput_has_a_panel_where_there_are_scores() -> None:
    with_scores = [point("full", 1, 1, 0.5), point("naive", 1, 1, 0.25), point("full", 8, 1)]  # of one set only
    *_, goodput = drawn(with_scores).axes
    assert "good answers" in goodput.get_ylabel()
    heights = [container[0].get_ydata().tolist() for container in goodput.containers]
    assert heights == [[0.5], [0.25], []]


def test_the_legend_names_user_sets_only_if_there_are_several() -> None:
    def names(points: Sequence[Point]) -> list[str]:
        return [text.get_text() for text in drawn(points).legends[0].get_texts()]

    assert names(POINTS) == ["full", "legolink-16", "1 user", "8 users, CCR 0.8", "all that arrives"]
    assert names([one for one in POINTS if one.users == 8]) == ["full", "legolink-16", "all that arrives"]


def test_equal_numbers_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.svg", "b.png"):
        plot_load(POINTS, "a title", tmp_path / name)
    for suffix in (".svg", ".png"):
        first, second = ((tmp_path / f"{stem}{suffix}").read_bytes() for stem in "ab")
        assert first == second
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
