"""Pictures: both kinds are written, the same numbers give the same bytes, and nothing is written after an error."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pictool.bench.breakdown import BreakdownResult, Broken, Parts
from pictool.bench.context import ContextResult, Curve, Point
from pictool.bench.floor import Rates
from pictool.bench.plot import (
    bar_parts,
    colours,
    picture,
    picture_paths,
    plot_breakdown,
    plot_context,
    require_matplotlib,
)
from pictool.bench.rounds import Spread
from pictool.errors import InputError

pytest.importorskip("matplotlib")


def curve(label: str, seconds: list[float], out_of_memory: int | None = None) -> Curve:
    points = [
        Point(1024 << i, Spread(s, s * 0.9, s * 1.1), s, 1.0, 0, None, 1.0, 1.0, ()) for i, s in enumerate(seconds)
    ]
    return Curve(label, {}, tuple(points), out_of_memory)


CONTEXT = ContextResult(
    (1024, 2048, 4096), Rates(1.0, 1.0),
    (curve("full", [1, 4, 16]), curve("naive", [0.1], 2048), curve("transformers", [], 1024)),
)  # fmt: skip
PARTS = Parts(1.0, 0.5, 0.25, (1, 2, 3), (0, 1, 0.5), 0.1, 0.2)
BREAKDOWN = BreakdownResult(
    128,
    (
        Broken("cacheblend-15", {}, (1, 2), Spread(9, 8, 10), PARTS, (PARTS,)),
        Broken("full", {}, (), Spread(9, 8, 10), Parts(0, 0, 0, (1,), (0,), 0, 0), ()),
    ),
)


@pytest.mark.parametrize("name", ["out.svg", "out.png", "out"])
def test_both_kinds_are_written_and_are_what_they_say(name: str) -> None:
    plot_context(CONTEXT, "a title", name)
    assert Path("out.svg").read_text().startswith("<?xml") and Path("out.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_numbers_give_the_same_bytes() -> None:
    for name in ("a", "b"):
        plot_context(CONTEXT, "t", f"context-{name}")
        plot_breakdown(BREAKDOWN, "t", f"breakdown-{name}")
    for name in ("context", "breakdown"):
        for suffix in ("svg", "png"):
            assert Path(f"{name}-a.{suffix}").read_bytes() == Path(f"{name}-b.{suffix}").read_bytes()


def test_exponents_and_labels_stand_in_the_picture() -> None:
    plot_context(CONTEXT, "a title", "out.svg")
    text = Path("out.svg").read_text()
    assert all(f"<!-- {shown} -->" in text for shown in ("a title", "full", "2.00 ± 0.00; 2.00", "4k"))
    plot_breakdown(BREAKDOWN, "a title", "out.svg")
    assert "<!--   31% -->" in Path("out.svg").read_text()  # layer 1: (2 + 1) of 9.55


def test_a_bar_is_all_parts_in_order() -> None:
    bars = bar_parts(BREAKDOWN.methods[0])
    assert [one[0] for one in bars] == [
        "load", "scoring", "select", "layer 0", "layer 1", "other layers", "logits", "other",
    ]  # fmt: skip
    assert sum(compute + check for _, compute, check in bars) == pytest.approx(PARTS.ttft)


def test_nothing_is_written_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), picture("out.svg", 1, 1):
        raise ZeroDivisionError
    assert not list(Path().glob("out.*"))


def test_colours_are_those_of_families() -> None:
    labels = ["full", "legolink-16", "legolink-2", "legolink-0", "cacheblend-15:on=k", "mine", "other-3"]
    chosen = colours(labels)
    assert len({*chosen.values()}) == len(labels)
    assert colours(["legolink-16"])["legolink-16"] == chosen["legolink-16"]
    assert colours(["cacheblend-15"])["cacheblend-15"] == chosen["cacheblend-15:on=k"]


def test_another_kind_of_picture_is_refused() -> None:
    assert picture_paths("a/b.png") == (Path("a/b.svg"), Path("a/b.png"))
    with pytest.raises(InputError, match=r"--plot x.pdf: must end in .svg or .png"):
        picture_paths("x.pdf")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"--plot: needs matplotlib.* pip install 'pictool\[plot\]'"):
        require_matplotlib()
