"""The numbers that tokens are coloured by, each against numpy on the trace or on its analysis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import make_trace

from pictool.tui.token_colors import ColorBy, color_modes, token_colors
from tui.drive import make_analysis

TRACE = make_trace([(1, 2, 5), (2, 5), (5,)], scores=np.arange(10, dtype=np.float32) - 3)
ANALYSIS = make_analysis(TRACE)
ATTENTION = ANALYSIS.attention
assert ATTENTION is not None
WEIGHTS = np.exp(ATTENTION.scores) / np.exp(ATTENTION.scores).sum(-1, keepdims=True)


def test_computed() -> None:
    colors = token_colors(TRACE, None, ColorBy())
    assert colors.values[:10].tolist() == [0, 1, 2, 0, 0, 3, 0, 0, 3, 3] and np.isnan(colors.values[10:]).all()
    assert colors.steps.tolist() == [0, 3, 6, 0, 0, 9, 0, 0, 9, 9, 0, 0] and colors.high == 3
    of_layer = token_colors(TRACE, None, ColorBy(layer=1))
    assert of_layer.steps[:10].nonzero()[0].tolist() == [2, 5, 8, 9] and of_layer.row == 1
    assert (of_layer.map[:, :10] == TRACE.rows).all()


def test_a_token_computed_at_one_of_many_layers_is_marked() -> None:
    rows = np.zeros((60, 10), dtype=bool)
    rows[:, 8:], rows[0, 3] = True, True
    assert token_colors(replace(TRACE, rows=rows), None, ColorBy()).steps[:8].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_scores() -> None:
    colors = token_colors(TRACE, None, ColorBy("score"))
    assert (colors.low, colors.high) == (-3, 6) and colors.values[:10].tolist() == list(range(-3, 7))
    assert colors.steps[0] == 0 and colors.steps[9] == 9 and (np.diff(colors.steps[:10]) >= 0).all()


@pytest.mark.parametrize("layer", [None, 2])
def test_deviation(layer: int | None) -> None:
    assert ANALYSIS.deviation is not None
    both = np.sqrt(ANALYSIS.deviation.kv.key**2 + ANALYSIS.deviation.kv.value**2)
    expected = both.mean(0) if layer is None else both[layer]
    assert np.allclose(token_colors(TRACE, ANALYSIS, ColorBy("kv", layer)).values[:10], expected)
    tokens = ANALYSIS.deviation.attention.tokens
    by_attention = token_colors(TRACE, ANALYSIS, ColorBy("attention-dev", layer)).values[:10]
    assert np.allclose(by_attention, tokens.mean(0) if layer is None else tokens[layer])


def test_what_can_be_shown() -> None:
    assert color_modes(make_trace(), None) == ("computed",)
    assert color_modes(TRACE, ANALYSIS) == ("computed", "score", "attention", "kv", "attention-dev")
