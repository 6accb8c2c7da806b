"""Answers, comparisons and traces of the torch engine, against numbers computed here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny
import torch
from safetensors import safe_open
from transformers import DynamicCache

from pictool.api import answer
from pictool.core import Chunk
from pictool.engines.base import first_token_kl
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.architectures import cache_name
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store

CHUNKS = [Chunk("a", tuple(range(5, 40)), "a"), Chunk("b", tuple(range(60, 80)), "b")]


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["qwen3"]()), tiny.tokenizer())


def request(policy: str, **fields: float) -> Spec:
    """With the chunks side by side, so that the numbers of these tests are those of the chunks alone."""
    return Spec("nobody knows?", CHUNKS, make_policy(policy, fields), max_new_tokens=12, separator="")


def test_kl_is_the_textbook_sum() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    want = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert first_token_kl(p.log() + 3, q.log() - 1) == pytest.approx(want, abs=1e-6)
    assert first_token_kl(p.log(), p.log()) == 0


def test_comparing_full_with_itself_finds_no_difference(model: Model, store: Store) -> None:
    compare = answer(model, store, request("full"), compare=True).compare
    assert compare is not None
    assert (compare.kl, compare.answer_kl, compare.same_answer, compare.same_first_token) == (0, 0, True, True)
    assert compare.common_prefix == 12 and compare.speedup > 0


def test_a_comparison_is_that_of_the_two_answers(model: Model, store: Store) -> None:
    full, naive = answer(model, store, request("full")), answer(model, store, request("naive"), compare=True)
    compare = naive.compare
    assert compare is not None and compare.answer == full.text
    assert compare.kl == pytest.approx(first_token_kl(full.logits, naive.logits))
    assert compare.kl > 0
    same = [a == b for a, b in zip(full.generated.tokens, naive.generated.tokens, strict=False)]
    assert compare.common_prefix == (same.index(False) if False in same else len(same))


def test_the_kl_of_a_whole_answer_is_that_of_transformers_with_the_linked_cache(model: Model, store: Store) -> None:
    """Full's logits are one forward over prompt and answer; the linked ones go on from the linked image's K and V."""
    full, naive = answer(model, store, request("full")), answer(model, store, request("naive"), compare=True)
    tokens, context = list(full.generated.tokens), naive.linked.image.layout.num_context
    prompt = naive.linked.image.layout.tokens.tolist()
    cache = DynamicCache()
    for layer in range(model.stack.num_layers):
        image = naive.linked.image
        cache.update(image.key(layer)[:, :, :context].clone(), image.value(layer)[:, :, :context].clone(), layer)
    module = type(model.module)(model.config).eval()
    module.load_state_dict(model.module.state_dict())
    module = reference.eager(module)
    with torch.inference_mode():
        exact = module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        rest = torch.tensor([prompt[context:] + tokens])
        own = module(rest, **{cache_name(module): cache}).logits[0, len(prompt) - context - 1 : -1]
    each = (exact.exp() * (exact - own.double().log_softmax(-1))).sum(-1)
    assert naive.compare is not None and len(each) == 12 and each.sum() > each[0] > 0
    assert naive.compare.answer_kl == pytest.approx(float(each.sum()), rel=1e-3)
    assert naive.compare.kl == pytest.approx(float(each[0]), rel=1e-3)


def test_recomputed_is_the_mean_of_context_rows_per_layer(model: Model, store: Store) -> None:
    report = answer(model, store, request("legolink", k=8)).report()
    assert report["tokens"]["recomputed"] == 16.0
    assert report["tokens"]["context"] == 1 + 35 + 20
    timing = report["timing"]
    assert timing["ttft_s"] == pytest.approx(timing["load_s"] + timing["select_s"] + timing["recompute_s"], rel=1e-6)


def test_a_trace_says_what_the_link_did(model: Model, store: Store, tmp_path: Path) -> None:
    result = answer(model, store, request("legolink", k=8))
    result.write_trace(tmp_path / "link.trace")
    with safe_open(tmp_path / "link.trace", "numpy") as trace:
        metadata, tensors = trace.metadata(), {name: trace.get_tensor(name) for name in trace.keys()}
    assert metadata["answer"] == result.text
    assert json.loads(metadata["report"]) == json.loads(json.dumps(result.report()))
    assert tensors["tokens"].dtype == np.int32 and tensors["starts"].tolist() == [0, 1, 36, 56]
    rows = np.zeros((3, len(tensors["tokens"])), dtype=bool)
    rows[:, 1:9] = rows[:, 36:44] = rows[:, 56:] = True
    assert np.array_equal(tensors["rows"], rows)
    assert np.array_equal(tensors["logits"], result.logits.numpy())
    assert int(tensors["logits"].argmax()) == result.generated.tokens[0]


def test_a_trace_of_a_dynamic_policy_shows_every_layer_and_the_scores(
    model: Model, store: Store, tmp_path: Path
) -> None:
    result = answer(model, store, request("cacheblend", ratio=0.25))
    result.write_trace(tmp_path / "link.trace")
    with safe_open(tmp_path / "link.trace", "numpy") as trace:
        rows, scores = trace.get_tensor("rows"), trace.get_tensor("scores")
    # r_1 = 1.3 · 0.25 of 56 context rows go on to layer 2; the layers 0 and 1 are computed (compared) in full.
    assert rows[:, :56].sum(1).tolist() == [56, 56, 19] and rows[:, 56:].all()
    assert scores.dtype == np.float32 and scores.shape == rows.shape[1:]
    assert set(np.argsort(-scores)[:19]) == set(np.flatnonzero(rows[2, :56]))
    assert result.report()["tokens"]["recomputed"] == pytest.approx((56 + 56 + 19) / 3)
