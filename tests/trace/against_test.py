"""A link against full recompute: KL by the textbook, deviation by its sums, and nothing where nothing differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from subjects import default_policy, subject

from pictool.api import answer
from pictool.errors import TraceError
from pictool.linker.spec import Spec
from pictool.store.store import Store
from pictool.trace.analysis import Look, look_behind
from pictool.trace.format import Trace


def traced(store: Store, policy: str, architecture: str = "llama") -> Trace:
    for name, text in (("a.txt", "The harbour was quiet. It holds a festival."), ("b.txt", "Words: 1,024 and 3.14.")):
        Path(name).write_text(text)
    request = Spec("why?", ["a.txt", "b.txt"], default_policy(policy), max_new_tokens=6)
    return answer(subject(architecture).model, store, request).trace()


def look(store: Store, trace: Trace, architecture: str = "llama") -> Look:
    return look_behind(subject(architecture).model, store, trace, "t")


@pytest.mark.parametrize("architecture", ["llama", "llama-dynamic", "gemma2"])
def test_kl_and_probabilities_are_those_of_two_plain_forwards(architecture: str, store: Store) -> None:
    """Full: transformers' own forward on the prompt and the tokens. Linked: what was logged when they were chosen."""
    trace = traced(store, "naive", architecture)
    against = look(store, trace, architecture).against
    ids = [*trace.layout.tokens.tolist(), *(one.id for one in trace.generated[:-1])]
    assert against is not None
    if architecture != "llama-dynamic":  # whose decoding turns other frequencies than one forward of all
        with torch.no_grad():
            logits = subject(architecture).reference(torch.tensor([ids])).logits[0, trace.layout.num_tokens - 1 :]
        full = logits.double().log_softmax(-1)
        for token, one, wanted in zip(trace.generated, against.generated, full, strict=True):
            assert one.full == pytest.approx(float(wanted[token.id].exp()), abs=1e-4)
            assert one.choice == int(wanted.argmax()) and one.choice_full == pytest.approx(
                float(wanted.max().exp()), abs=1e-4
            )
        p, q = full[0], torch.from_numpy(trace.logits).double().log_softmax(-1)
        assert against.generated[0].kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
    linked = [one.linked for one in against.generated]
    np.testing.assert_allclose(linked, np.exp([one.logprob for one in trace.generated]), atol=1e-5)
    assert all(one.kl > 0 for one in against.generated)


def test_full_is_not_apart_from_full(store: Store) -> None:
    found = look(store, traced(store, "full"))
    assert found.against is not None
    assert not found.against.kv.both.any() and not found.against.attention.gained.any()
    assert all(one.kl == 0 and one.linked == one.full for one in found.against.generated)


def test_attention_gained_is_lost_elsewhere_and_columns_make_the_norm(store: Store) -> None:
    found = look(store, traced(store, "naive")).against
    assert found is not None
    attention = found.attention
    np.testing.assert_allclose(attention.gained.sum(1), 0, atol=1e-6)
    assert np.abs(attention.gained[1:]).max() > 1e-3
    assert attention.gained.shape == attention.tokens.shape == found.kv.key.shape
    # By the triangle inequality a column is no longer than the matrix, and all of them together no shorter.
    assert (attention.tokens.max(1) <= attention.layers + 1e-6).all()
    assert (attention.tokens.sum(1) >= attention.layers - 1e-6).all()
    assert found.correlation.layers.shape == (1,)


def test_only_what_is_asked_is_looked_at(store: Store) -> None:
    model, trace = subject("llama").model, traced(store, "naive")
    seen = look_behind(model, store, trace, "t", against=False, layer=1)
    assert seen.against is None and seen.attention is not None and seen.attention.layers == (1,)
    seen = look_behind(model, store, trace, "t", attention=False)
    assert seen.attention is None and seen.against is not None and len(seen.choices) == len(trace.generated)


def test_a_trace_that_the_model_does_not_repeat_shows_nothing(store: Store) -> None:
    trace = traced(store, "naive")
    with pytest.raises(TraceError, match="cannot be repeated"):
        look(store, replace(trace, logits=-trace.logits))
