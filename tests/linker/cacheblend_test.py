"""CacheBlend §4.3 against a dense reference: selected sets, narrowed sets of every layer, K, V and logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
import tiny
from subjects import (
    ARCHITECTURES,
    LENGTH_DEPENDENT,
    LENGTHS,
    Subject,
    make_chunks,
    max_difference,
    parts_of,
    run,
    subject,
)

from pictool.errors import InputError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.linker.policies.cacheblend import CacheBlend
from pictool.runtime.model import wrap_model
from pictool.store.store import Store

RATIOS = [0.0, 0.001, 0.05, 0.15, 0.3, 0.5, 0.8, 1.0]


def deep_subject() -> Subject:
    module = tiny.random_module(type(tiny.CONFIGS["qwen3"]())(**{**tiny.SIZE, "num_hidden_layers": 7}))
    return Subject(wrap_model(module, tiny.tokenizer(), "deep"), reference.eager(module))


def require_equal_to_reference(one: Subject, linked: Linked, ratios: dict[int, float], on: str) -> None:
    num_context = linked.image.layout.num_context
    counts = {layer: math.ceil(round(ratio * num_context, 6)) for layer, ratio in ratios.items()}
    dense, rows, gap = reference.cacheblend(one.reference, parts_of(linked), counts, on)
    assert gap > 1e-4, "the reference's own choice hangs on rounding; take other chunks"
    assert np.array_equal(linked.rows, rows.numpy())
    assert max_difference(linked, dense) <= 1e-4


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("fields", [{"filter": "gradual"}, {"filter": "single"}, {"on": "k"}, {"on": "kv"}], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3-partial"])
def test_every_ratio_equals_the_reference(
    architecture: str, fields: dict[str, Any], ratio: float, store: Store
) -> None:
    one = subject(architecture)
    policy = CacheBlend(ratio=ratio, **fields)
    linked = run(one, store, policy, make_chunks(LENGTHS))
    if ratio == 1:
        assert linked.rows.all()
        assert max_difference(linked, reference.full(one.reference, sum(parts_of(linked), []))) <= 1e-4
    else:
        require_equal_to_reference(one, linked, policy.ratios(3), policy.on)


@pytest.mark.parametrize("filter", ["gradual", "single"])
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in LENGTH_DEPENDENT])
def test_every_architecture_equals_the_reference(architecture: str, filter: str, store: Store) -> None:
    one, policy = subject(architecture), CacheBlend(ratio=0.2, filter=filter)
    require_equal_to_reference(one, run(one, store, policy, make_chunks(LENGTHS)), policy.ratios(3), "v")


@pytest.mark.parametrize(
    "fields", [{}, {"layers": "1,3,4"}, {"layers": "2", "filter": "single"}, {"schedule": 0.9}], ids=str
)
def test_narrowing_over_many_layers_equals_the_reference(fields: dict[str, Any], store: Store) -> None:
    one, policy = deep_subject(), CacheBlend(ratio=0.4, **fields)
    linked = run(one, store, policy, make_chunks(LENGTHS))
    require_equal_to_reference(one, linked, policy.ratios(7), "v")
    counts = linked.rows.sum(1)
    assert (np.diff(counts) <= 0).all() and counts[0] > counts[-1]


def test_scores_are_the_first_deviations(store: Store) -> None:
    """Head rows are exact, so their score is 0; the tail has none."""
    linked = run(subject("llama"), store, CacheBlend(), make_chunks(LENGTHS))
    assert linked.scores is not None
    (_, head_end), (tail, _) = linked.image.layout.head, linked.image.layout.tail
    assert linked.scores[:head_end] == pytest.approx(0, abs=1e-8) and not linked.scores[tail:].any()
    assert np.median(linked.scores[head_end:tail]) > 1e-3
    going_on = linked.rows[2, :tail]
    assert linked.scores[:tail][going_on].min() >= linked.scores[:tail][~going_on].max() - 1e-6


@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.15, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("layers", ["", "1", "1,2", "1,30", "4,5,20"])
def test_the_mean_ratio_is_the_ratio(ratio: float, layers: str) -> None:
    ratios = CacheBlend(ratio=ratio, layers=layers).ratios(32)
    if ratio == 1:
        assert not ratios
        return
    held = [end - layer for layer, end in zip(ratios, [*list(ratios)[1:], 32], strict=True)]
    mean = sum(n * r for n, r in zip(held, ratios.values(), strict=True)) / sum(held)
    assert mean == pytest.approx(ratio)
    values = list(ratios.values())
    assert values == sorted(values, reverse=True) and all(-1e-12 <= value <= 1 + 1e-12 for value in values)
    assert values[0] <= 1.3 * ratio + 1e-12


def test_the_default_schedule() -> None:
    """By hand: 5 layers, r = 0.2; checked are 1 to 4; from 1.3 r to 0.7 r in equal steps."""
    assert list(CacheBlend(ratio=0.2).ratios(5).values()) == pytest.approx([0.26, 0.22, 0.18, 0.14])
    assert CacheBlend(ratio=0.2, filter="single").ratios(5) == {1: pytest.approx(0.2)}


def test_a_model_of_one_layer_is_exact(store: Store) -> None:
    module = tiny.random_module(type(tiny.CONFIGS["llama"]())(**{**tiny.SIZE, "num_hidden_layers": 1}))
    one = Subject(wrap_model(module, tiny.tokenizer(), "one layer"), reference.eager(module))
    linked = run(one, store, CacheBlend(), make_chunks(LENGTHS))
    assert max_difference(linked, reference.full(one.reference, sum(parts_of(linked), []))) <= 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio": -0.1}, "ratio=-0.1"),
        ({"ratio": float("nan")}, "ratio=nan"),
        ({"on": "q"}, "on='q'"),
        ({"filter": "both"}, "filter='both'"),
        ({"layers": "0,1"}, "layers='0,1'"),
        ({"layers": "2,2"}, "layers="),
        ({"layers": "one"}, "layers="),
        ({"layers": "1,2", "filter": "single"}, "filter=single"),
        ({"schedule": 2}, "schedule=2.0"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        make_policy("cacheblend", fields)
    assert message in str(refused.value)


def test_a_layer_that_the_model_lacks_is_refused(store: Store) -> None:
    with pytest.raises(InputError, match=r"^cacheblend: .*1,3.* 0 .* 2"):
        run(subject("llama"), store, CacheBlend(layers="1,3"), make_chunks(LENGTHS))
