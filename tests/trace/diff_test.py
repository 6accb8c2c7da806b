"""Differences of two traces that were made by hand; overlap by sets, KL by torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from traces import make_trace

from pictool.core import Layout
from pictool.errors import TraceError
from pictool.trace.diff import diff_selections, diff_traces
from pictool.trace.format import Candidate, GeneratedToken

MASKS = st.tuples(st.integers(1, 4), st.integers(1, 12)).flatmap(
    lambda shape: st.tuples(arrays(bool, shape), arrays(bool, shape))
)


@settings(max_examples=200, deadline=None)
@given(MASKS)
def test_overlap_is_that_of_sets(pair: tuple[np.ndarray, np.ndarray]) -> None:  # type: ignore[type-arg]
    diff = diff_selections(*pair)
    a, b = ([set(np.flatnonzero(layer)) for layer in selection] for selection in pair)
    expected = [len(x & y) / len(x | y) if x | y else 1.0 for x, y in zip(a, b, strict=True)]
    assert diff.jaccard.tolist() == pytest.approx(expected)
    cells = [{(i, token) for i, layer in enumerate(selection) for token in layer} for selection in (a, b)]
    either = len(cells[0] | cells[1])
    assert diff.overall == pytest.approx(len(cells[0] & cells[1]) / either if either else 1.0)
    any_a, any_b = set().union(*a), set().union(*b)
    assert set(np.flatnonzero(diff.both)) == any_a & any_b
    assert set(np.flatnonzero(diff.only_a)) == any_a - any_b and set(np.flatnonzero(diff.only_b)) == any_b - any_a


def test_two_traces_made_by_hand() -> None:
    a = make_trace([(1, 2), (1,), ()])
    generated = (GeneratedToken(2, " no", -0.2), GeneratedToken(1, "</s>", -0.1))
    logits = np.array([0, 1, 4, 3, 0, 0, -1], dtype=np.float32)
    b = make_trace([(2, 3), (3,), ()], logits=logits, generated=generated, top=(Candidate(2, " no"), Candidate(4, "!")))
    b = replace(b, report={**b.report, "answer": "no"}, chunks=(a.chunks[0], replace(a.chunks[1], key="3" * 64)))
    diff = diff_traces(a, b)
    assert diff.selection.jaccard.tolist() == [pytest.approx(1 / 3), 0, 1] and diff.selection.overall == 1 / 5
    p, q = (torch.from_numpy(trace.logits).double().log_softmax(-1) for trace in (a, b))
    assert diff.kl == pytest.approx((float((p.exp() * (p - q)).sum()), float((q.exp() * (q - p)).sum())))
    assert diff.max_logit == 2 and diff.other_objects == (1,)
    assert (diff.common, diff.parting, diff.same_answer) == (0, (a.generated[0], b.generated[0]), False)
    assert [(candidate.id, candidate.text, candidate.logits) for candidate in diff.candidates] == [
        (2, " no", (2, 4)), (3, " yes", (3, 3)), (4, "!", (0, 0))
    ]  # fmt: skip
    assert diff.candidates[0].probabilities == pytest.approx((float(p[2].exp()), float(q[2].exp())))


def test_a_trace_does_not_differ_from_itself() -> None:
    diff = diff_traces(make_trace(), make_trace())
    assert diff.selection.jaccard.tolist() == [1, 1, 1] and diff.kl == (0, 0) and diff.max_logit == 0
    assert (diff.common, diff.parting, diff.same_answer, diff.other_objects) == (2, (None, None), True, ())


def test_an_answer_that_goes_on_parts_where_the_other_ends() -> None:
    trace = make_trace()
    longer = replace(trace, generated=(*trace.generated, GeneratedToken(4, " more", -1.0)))
    assert diff_traces(trace, longer).parting == (None, longer.generated[2])
    assert diff_traces(longer, trace).common == 2


def test_other_prompts_and_models_are_refused() -> None:
    trace = make_trace()
    layout = Layout.of([0], [[1, 2, 4], [4, 5, 6, 1]], [2, 3])
    for other in (make_trace(layout=layout), make_trace(layout=Layout(trace.layout.tokens, (0, 1, 5, 8)))):
        with pytest.raises(TraceError, match=r"^A and B: .*prompts"):
            diff_traces(trace, other)
    changes: dict[str, Any] = {"model": "c" * 64, "dtype": "float16"}
    for field, value in changes.items():
        with pytest.raises(TraceError, match=r"^x.* y: .*models"):
            diff_traces(trace, make_trace(target=replace(trace.target, **{field: value})), ("x", "y"))
