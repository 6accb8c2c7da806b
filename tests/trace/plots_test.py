"""Pictures: the same bytes for the same input, and the numbers that were put in."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import make_trace

from pictool.errors import InputError
from pictool.trace import plots
from pictool.trace.attention import AttentionMap
from pictool.trace.attention_sinks import NUM_OFFSETS, AttentionSinks
from pictool.trace.deviation import (
    AttentionDeviation,
    DeviationFromFull,
    GeneratedDeviation,
    KVDeviation,
    NeighbourCorrelation,
)

DRAW = np.random.default_rng(0)
SCORES = np.where(np.arange(11) > np.arange(8, 11)[:, None], -np.inf, DRAW.normal(size=(3, 2, 3, 11)))
MAP = AttentionMap(SCORES.astype(np.float32), (0, 1, 2), (0, 1, 4, 8), 10)
DEVIATION = DRAW.random((3, 10), dtype=np.float32)
FROM_FULL = DeviationFromFull(
    KVDeviation(DEVIATION, DEVIATION, DEVIATION),
    AttentionDeviation(np.ones(3), DEVIATION, DEVIATION - DEVIATION.mean()),
    NeighbourCorrelation(np.ones(1)),
    (GeneratedDeviation(3, 0.5, 0.1, 0.2, 3, 0.1, 0.2), GeneratedDeviation(1, 0.0, 1, 1, 1, 1, 1)),
)
SINKS = AttentionSinks(4, 30, DRAW.random((3, 2)), np.zeros((3, 2)), DRAW.random((3, 2, 16)), 0.1)
TRACE = make_trace(
    scores=np.arange(10, dtype=np.float32), pieces=("<s>", "$x^2$", "\x1b", "東", "&", "<", "]]>", "_", "\\", "%")
)
FIGURES = {
    "attention": lambda: plots.draw_attention([(TRACE, MAP), (TRACE, MAP)]),
    "share": lambda: plots.draw_attention([(TRACE, MAP)], 1, 0, "share"),
    "selection": lambda: plots.draw_selection([TRACE, make_trace()]),
    "deviation": lambda: plots.draw_deviation([(TRACE, FROM_FULL)]),
    "sinks": lambda: plots.draw_attention_sinks(SINKS, "0123"),
    "offsets": lambda: plots.draw_share_by_offset([(TRACE, MAP)]),
}


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.parametrize("name", FIGURES)
def test_the_same_input_gives_the_same_bytes(name: str, suffix: str) -> None:
    paths = [Path(f"{i}.{suffix}") for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in paths:
            plots.save(FIGURES[name](), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second and len(first) < 400_000
    assert first.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")
    assert suffix == "png" or b"<dc:date>" not in first


def images(figure: Any) -> list[Any]:
    return [axis.images[0].get_array() for axis in figure.axes if axis.images]


def test_pictures_show_the_numbers() -> None:
    np.testing.assert_allclose(images(FIGURES["attention"]())[0].filled(np.nan), MAP.minmax(), rtol=1e-12)
    np.testing.assert_allclose(images(FIGURES["share"]())[0], MAP.share(1, 0), rtol=1e-12)
    assert np.array_equal(images(FIGURES["selection"]())[0], TRACE.rows)
    kv, gained = images(FIGURES["deviation"]())[:2]
    np.testing.assert_allclose(kv, FROM_FULL.kv.both, rtol=1e-6)
    np.testing.assert_allclose(gained, FROM_FULL.attention.gained, rtol=1e-6)
    np.testing.assert_allclose(images(FIGURES["sinks"]())[0], 100 * SINKS.initial_share)
    line = FIGURES["offsets"]().axes[0].lines[0]
    np.testing.assert_allclose(
        np.asarray(line.get_ydata(), dtype=np.float64), 100 * MAP.share_by_offset(NUM_OFFSETS).mean(0)
    )


def test_ticks_stand_where_parts_start() -> None:
    axis = FIGURES["attention"]().axes[0]
    assert axis.get_xticks().tolist() == [0, 1, 4, 8]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "1", "4", "8"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["\\", "%", " yes"]


def test_a_long_prompt_keeps_its_largest_of_either_sign() -> None:
    values = np.zeros((1, 10_000))
    values[0, [123, 9_999]] = 5, -7
    shown = plots._bin_signed(values, plots.MAX_COLUMNS)
    assert shown.values.shape == (1, 1200) and shown.values[0, shown.bin_of(123)] == 5 and shown.values[0, -1] == -7


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"^--plot: needs matplotlib; install it with: pip install 'pictool\[plot\]'$"):
        plots.require_matplotlib()
