"""The numbers behind the colours, each against numpy on the trace or on a look."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import make_trace

from pictool.tui.shades import Choice, modes_of, shade_of, sinks_of
from pictool.tui.trace_text import part_rows, token_line
from tui.drive import make_look, opened

TRACE = make_trace([(1, 2, 5), (2, 5), (5,)], scores=np.arange(10, dtype=np.float32) - 3)
LOOK = make_look(TRACE)
SEEN = LOOK.attention
assert SEEN is not None
WEIGHTS = np.exp(SEEN.scores) / np.exp(SEEN.scores).sum(-1, keepdims=True)


def test_computed() -> None:
    shade = shade_of(TRACE, None, Choice())
    assert shade.values[:10].tolist() == [0, 1, 2, 0, 0, 3, 0, 0, 3, 3] and np.isnan(shade.values[10:]).all()
    assert shade.steps.tolist() == [0, 3, 6, 0, 0, 9, 0, 0, 9, 9, 0, 0] and shade.most == 3
    one = shade_of(TRACE, None, Choice(layer=1))
    assert one.steps[:10].nonzero()[0].tolist() == [2, 5, 8, 9] and one.row == 1
    assert (one.map[:, :10] == TRACE.rows).all()


def test_a_token_computed_at_one_of_many_layers_is_marked() -> None:
    rows = np.zeros((60, 10), dtype=bool)
    rows[:, 8:], rows[0, 3] = True, True
    assert shade_of(replace(TRACE, rows=rows), None, Choice()).steps[:8].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_scores() -> None:
    shade = shade_of(TRACE, None, Choice("score"))
    assert (shade.least, shade.most) == (-3, 6) and shade.values[:10].tolist() == list(range(-3, 7))
    assert shade.steps[0] == 0 and shade.steps[9] == 9 and (np.diff(shade.steps[:10]) >= 0).all()


@pytest.mark.parametrize(("layer", "head", "row"), [(None, None, None), (1, None, None), (2, 1, 0), (None, 0, 2)])
def test_attention_is_the_softmax(layer: int | None, head: int | None, row: int | None) -> None:
    shade = shade_of(TRACE, LOOK, Choice("attention", layer, head, row))
    wanted = WEIGHTS if layer is None else WEIGHTS[[layer]]
    wanted = wanted if head is None else wanted[:, [head]]
    wanted = wanted if row is None else wanted[:, :, [row]]
    assert np.allclose(shade.values[:11], wanted.mean((0, 1, 2)), atol=1e-6)
    assert np.nansum(shade.values) == pytest.approx(1, abs=1e-6)
    assert shade.labels == (" h", "?", " yes")


def test_scaled_scores_are_in_the_unit_range() -> None:
    shade = shade_of(TRACE, LOOK, Choice("minmax", 1, 0, 1))
    assert SEEN is not None
    row = SEEN.scores[1, 0, 1, :10].astype(np.float64)
    assert np.allclose(shade.values[:10], (row - row.min()) / (row.max() - row.min()))
    assert shade.most == 1 and np.isnan(shade.values[10:]).all()


@pytest.mark.parametrize("layer", [None, 2])
def test_deviation(layer: int | None) -> None:
    assert LOOK.against is not None
    both = np.sqrt(LOOK.against.kv.key**2 + LOOK.against.kv.value**2)
    wanted = both.mean(0) if layer is None else both[layer]
    assert np.allclose(shade_of(TRACE, LOOK, Choice("kv", layer)).values[:10], wanted)
    tokens = LOOK.against.attention.tokens
    found = shade_of(TRACE, LOOK, Choice("attention-dev", layer)).values[:10]
    assert np.allclose(found, tokens.mean(0) if layer is None else tokens[layer])


@pytest.mark.parametrize(("layer", "head", "row"), [(None, None, None), (2, 1, None), (0, None, 1)])
def test_sinks_of_every_part(layer: int | None, head: int | None, row: int | None) -> None:
    assert SEEN is not None
    drawn, even = sinks_of(SEEN, Choice("attention", layer, head, row), 2)
    picked = WEIGHTS[slice(None) if layer is None else [layer]][:, slice(None) if head is None else [head]]
    rows = range(3) if row is None else [row]
    wanted = [np.mean([picked[:, :, r, a:b].sum(-1).mean() for r in rows]) for a, b in ((0, 1), (1, 3), (4, 6))]
    assert np.allclose(drawn, wanted, atol=1e-6)
    assert np.allclose(even, [np.mean([size / (8 + r + 1) for r in rows]) for size in (1, 2, 2)])


def test_what_can_be_shown() -> None:
    assert modes_of(make_trace(), None) == ("computed",)
    assert modes_of(TRACE, LOOK) == ("computed", "score", "attention", "minmax", "kv", "attention-dev")


def test_words_of_a_token() -> None:
    shade = shade_of(TRACE, LOOK, Choice("attention"))
    line = token_line(TRACE, LOOK, shade, 5).plain
    assert line.startswith("2+1 «e»  id 5, position 5, computed at 3 of 3 layers, score 2, |d(K,V)| ")
    assert line.endswith(f"share of attention: {shade.values[5]:.4g}")
    line = token_line(TRACE, LOOK, shade, 11).plain
    assert line.startswith(
        "answer+1 «</s>»  id 1, logprob -0.01, KL 0.5, p 0.2500, under full 0.7500, full's choice ' no'"
    )


def test_parts_of_one_layer() -> None:
    found = opened(TRACE)
    rows = part_rows(found.trace, found.view, None, Choice(layer=1))
    assert [row[:4] for row in rows] == [
        ("head", "0", "1", "0.0"), ("1", "1", "3", "1.0"), ("2", "4", "4", "1.0"), ("tail", "8", "2", "2.0"),
    ]  # fmt: skip
