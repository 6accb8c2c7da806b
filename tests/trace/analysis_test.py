"""The analysis of a trace: what is requested, and only of a link that the model repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest
from subjects import subject
from traces import trace_of_link

from pictool.errors import TraceError
from pictool.store.store import Store
from pictool.trace.analysis import analyse_trace


def test_only_what_is_requested_is_computed(store: Store) -> None:
    model, trace = subject("llama").model, trace_of_link(store, "naive")
    analysis = analyse_trace(model, store, trace, "t", deviation=False, layer=1)
    assert analysis.deviation is None and analysis.attention is not None and analysis.attention.layers == (1,)
    analysis = analyse_trace(model, store, trace, "t", attention=False)
    assert (
        analysis.attention is None and analysis.deviation is not None and len(analysis.choices) == len(trace.generated)
    )


def test_a_trace_that_the_model_does_not_repeat_shows_nothing(store: Store) -> None:
    trace = trace_of_link(store, "naive")
    with pytest.raises(TraceError):
        analyse_trace(subject("llama").model, store, replace(trace, logits=-trace.logits), "t")
