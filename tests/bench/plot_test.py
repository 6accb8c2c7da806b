"""Pictures: both kinds are written, the same numbers give the same bytes, and nothing is written after an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pictool.bench.context import TRANSFORMERS_STYLE, ContextResult, Curve, CurvePoint
from pictool.bench.plot import (
    line_colours,
    picture,
    picture_paths,
    plot_context,
)
from pictool.bench.repeats import MedianRange
from pictool.bench.roofline import Rates
from pictool.errors import InputError
from pictool.eval.algorithms import plot_style
from pictool.linker.policies.base import PlotStyle

pytest.importorskip("matplotlib")


def curve(
    label: str, seconds: list[float], out_of_memory: int | None = None, style: PlotStyle = PlotStyle()
) -> Curve:  # fmt: skip
    points = [
        CurvePoint(1024 << i, MedianRange(s, s * 0.9, s * 1.1), s, 1.0, 0, None, 1.0, 1.0, ())
        for i, s in enumerate(seconds)
    ]
    return Curve(label, {}, tuple(points), out_of_memory, style)


CONTEXT = ContextResult(
    (1024, 2048, 4096), Rates(1.0, 1.0),
    (curve("full", [1, 4, 16]), curve("naive", [0.1], 2048), curve("transformers", [], 1024)),
)  # fmt: skip


@pytest.mark.parametrize("name", ["out.svg", "out.png", "out"])
def test_both_kinds_are_written_and_are_what_they_say(name: str) -> None:
    plot_context(CONTEXT, "a title", name)
    assert Path("out.svg").read_text().startswith("<?xml") and Path("out.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_numbers_give_the_same_bytes() -> None:
    for name in ("a", "b"):
        plot_context(CONTEXT, "t", f"context-{name}")
    for suffix in ("svg", "png"):
        assert Path(f"context-a.{suffix}").read_bytes() == Path(f"context-b.{suffix}").read_bytes()


def test_exponents_and_labels_stand_in_the_picture() -> None:
    plot_context(CONTEXT, "a title", "out.svg")
    text = Path("out.svg").read_text()
    assert all(f"<!-- {shown} -->" in text for shown in ("a title", "full", "2.00 ± 0.00; 2.00", "4k"))


def test_nothing_is_written_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), picture("out.svg", 1, 1):
        raise ZeroDivisionError
    assert not list(Path().glob("out.*"))


LINE_COLOURS = {
    "full": ("#111111",), "naive": ("#9467bd",), "legolink": ("#08519c", "#3182bd", "#6baed6", "#9ecae1"),
    "legolink-0": ("#17becf",), "cacheblend": ("#d94801", "#fd8d3c", "#fdae6b", "#fdd0a2"),
    "speccache": ("#006d2c", "#31a354", "#74c476"), "unknown": ("#a50f15", "#8c6d31", "#e377c2", "#7f7f7f"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINE_COLOURS)
def test_policies_have_their_colours(name: str) -> None:
    assert plot_style(name).line_colors == LINE_COLOURS[name]


def test_variants_of_a_policy_take_its_colours_one_after_another() -> None:
    names = {
        "full": "full", "legolink-16": "legolink", "legolink-2": "legolink", "legolink-0": "legolink-0",
        "cacheblend-15:on=k": "cacheblend", "mine": "mine", "other-3": "other",
    }  # fmt: skip
    chosen = line_colours({label: plot_style(name) for label, name in names.items()})
    assert len({*chosen.values()}) == len(names)
    assert line_colours({"legolink-16": plot_style("legolink")})["legolink-16"] == chosen["legolink-16"]
    assert line_colours({"cacheblend-15": plot_style("cacheblend")})["cacheblend-15"] == chosen["cacheblend-15:on=k"]
    five = line_colours({f"legolink-{k}": plot_style("legolink") for k in range(5)})
    assert list(five.values()) == [*LINE_COLOURS["legolink"], LINE_COLOURS["legolink"][0]]


def test_baselines_of_a_curve_have_colours_of_their_own() -> None:
    plot_context(replace(CONTEXT, curves=(curve("transformers", [1, 2], style=TRANSFORMERS_STYLE),)), "t", "out.svg")
    assert "#8c8c8c" in Path("out.svg").read_text()


def test_another_kind_of_picture_is_refused() -> None:
    assert picture_paths("a/b.png") == (Path("a/b.svg"), Path("a/b.png"))
    with pytest.raises(InputError, match=r"--plot x.pdf: must end in .svg or .png"):
        picture_paths("x.pdf")
