"""Counts of a trace that was made by hand; probabilities by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from traces import make_trace

from pictool.core import Layout
from pictool.trace.counts import count_rows


def test_counts_by_part_layer_and_token() -> None:
    counts = count_rows(make_trace([(1, 2, 5), (2, 5), (5,)]))
    assert [(part.source, part.start, part.end) for part in counts.parts] == [
        ("head", 0, 1), ("a.txt", 1, 4), ("b.txt", 4, 8), ("tail", 8, 10)
    ]  # fmt: skip
    assert [part.per_layer.tolist() for part in counts.parts] == [[0, 0, 0], [2, 1, 0], [1, 1, 1], [2, 2, 2]]
    assert [part.computed for part in counts.parts] == [0, 1, 1, 2]
    assert counts.rows_per_layer.tolist() == [3, 2, 1] and counts.layers_per_token.tolist() == [
        0,
        1,
        2,
        0,
        0,
        3,
        0,
        0,
        3,
        3,
    ]
    assert all(part.score is None for part in counts.parts)


def test_scores_by_part_and_candidates_by_probability() -> None:
    trace = make_trace(scores=np.arange(10, dtype=np.float32))
    counts = count_rows(trace)
    assert [part.score for part in counts.parts] == [(0, 0), (2, 3), (5.5, 7), (8.5, 9)]
    expected = torch.from_numpy(trace.logits).softmax(-1)
    assert [(token.id, token.text) for token in counts.candidates] == [(3, " yes"), (2, " no")]
    assert [token.probability for token in counts.candidates] == pytest.approx([float(expected[3]), float(expected[2])])


def test_an_empty_part_has_no_scores() -> None:
    layout = Layout.of([], [[1, 2, 3], [4, 5, 6, 1]], [2, 3, 5])
    counts = count_rows(make_trace(layout=layout, scores=np.ones(10, dtype=np.float32)))
    assert counts.parts[0].score is None and counts.parts[0].num_tokens == 0
