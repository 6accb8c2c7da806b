"""Traffic whose reuse is known: prefix and linkable are what is true of it, within the edges of its pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traffic import KINDS, requests
from pictool.estimate.forms import Forms
from pictool.estimate.measure import Measure
from pictool.estimate.readers import LogReader

SAMPLES = Path(__file__).parents[2] / "fixtures" / "traffic"
EDGE = 64 + 16  # bytes that a piece may gain or lose: less than a window, or than a block; and a message's template


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_of_the_generator(kind: str) -> None:
    measure, forms = Measure(), Forms()
    for record, told in requests(kind, 120):
        truth = told
        for prompt in forms.prompts(record):
            measure.add(prompt)
    tokens = measure.finish().tokens
    reused, edges = truth.prefix + truth.moved, EDGE * truth.pieces
    assert abs(4 * tokens.prefix - truth.prefix) <= edges
    assert 0.75 * reused - edges / 4 <= 4 * (tokens.prefix + tokens.linked) <= reused + edges


def test_a_growing_history_is_the_prefix_cache_s_and_documents_are_not() -> None:
    found = {}
    for name in ("chat", "rag"):
        measure = Measure()
        for prompt in LogReader().read([str(SAMPLES / f"{name}.jsonl.zst")]):
            measure.add(prompt)
        found[name] = measure.finish().tokens
    assert found["chat"].linked < 0.02 * found["chat"].total < found["chat"].prefix
    assert found["rag"].linked > 2 * found["rag"].prefix
