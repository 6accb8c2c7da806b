"""Pictures: both kinds are written, the same numbers give the same bytes, and nothing is written after an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import eval_plot
from benchmarks.pictures import line_colours, picture, picture_paths
from pictool.errors import InputError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_a_table_of_pic_eval_gives_the_same_bytes_again() -> None:
    for name in ("a", "b"):
        eval_plot.plot(json.loads((RESULTS / "eval_world.json").read_text()), Path(name))
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes() and Path("a.svg").read_text().startswith("<?xml")
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_nothing_beats_the_front() -> None:
    assert eval_plot.pareto_front([(3, 1), (1, 0.5), (2, 0.4), (4, 1), (2, 0.7)]) == [(1, 0.5), (2, 0.7), (3, 1)]


def test_nothing_is_written_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), picture("out.svg", 1, 1):
        raise ZeroDivisionError
    assert not list(Path().glob("out.*"))


def test_variants_of_a_policy_take_its_colours_one_after_another() -> None:
    chosen = line_colours({"legolink-16": "legolink", "legolink-2": "legolink", "full": "full", "mine": "mine"})
    assert len({*chosen.values()}) == 4
    assert line_colours({"legolink-2": "legolink"})["legolink-2"] == chosen["legolink-16"]


def test_another_kind_of_picture_is_refused() -> None:
    assert picture_paths("a/b.png") == (Path("a/b.svg"), Path("a/b.png"))
    with pytest.raises(InputError, match=r"x\.pdf"):
        picture_paths("x.pdf")
