"""SpecCache §2: the chosen set against loops written from the paper, and links against the dense reference."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from alone import link
from hypothesis import given
from hypothesis import strategies as st
from subjects import HEAD, LENGTHS, TAIL, make_chunks, max_difference, parts_of, run, subject

from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.linker.policies.speccache import SpecCache
from pictool.runtime.model import load_model
from pictool.store.store import Store

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures").glob("**/*.txt"))[:5]


def chosen_by_the_paper(scores: list[float], policy: SpecCache) -> set[int]:
    """Equations 2 to 6 and the budget control, token by token."""
    if not scores:
        return set()
    by_rank = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    count = math.ceil(round(policy.ratio * len(scores), 9))
    initial = set(by_rank[:count])
    low, high = min(scores), max(scores)
    level = [(score - low) / (high - low) if high > low else 0.0 for score in scores]
    spans, current = [], [0]
    for i in range(1, len(scores)):
        if level[i] == level[i - 1]:
            change = 0.0
        else:
            change = abs(level[i] - level[i - 1]) / level[i - 1] if level[i - 1] else math.inf
        is_smooth = change == 0 or change < policy.tau_smooth
        if is_smooth and len(current) < policy.max_span:
            current.append(i)
        else:
            spans.append(current)
            current = [i]
    spans.append(current)
    chosen = set(initial)
    for span in spans:
        if len(initial & set(span)) / len(span) >= policy.tau_cover:
            chosen |= set(span)
    most = math.floor(round(policy.budget * count, 9))
    return set([i for i in by_rank if i in chosen][:most])


def complete(policy: SpecCache, scores: list[float]) -> list[int]:
    found: list[int] = np.flatnonzero(policy.complete(np.asarray(scores, dtype=np.float32))).tolist()
    return found


@given(
    # Quarters are exact in float32: the two computations must not differ by rounding alone.
    st.lists(st.integers(0, 12).map(lambda i: i / 4), max_size=60),
    st.sampled_from([0.0, 0.01, 0.1, 0.15, 0.3, 0.5, 0.9]),
    st.sampled_from([0.0, 0.2, 0.4, 1.0, 5.0]),
    st.sampled_from([0.0, 0.5, 0.7, 1.0]),
    st.integers(1, 16),
    st.sampled_from([1.0, 1.2, 2.0, 100.0]),
)
def test_the_set_is_that_of_the_paper(
    scores: list[float], ratio: float, smooth: float, cover: float, span: int, budget: float
) -> None:
    policy = SpecCache(ratio, tau_smooth=smooth, tau_cover=cover, max_span=span, budget=budget)
    assert set(complete(policy, scores)) == chosen_by_the_paper(scores, policy)


#             in   the  New  York City the  mayor said
NEW_YORK = [0.02, 0.0, 1.0, 0.7, 0.9, 0.1, 0.3, 0.05]


def test_new_york_city() -> None:
    """§2.3: TopK takes New and City. The three are one smooth span; filling it needs 2/3 of it to be cover enough.

    With the paper's own τ_cover of 0.7 it is not, and the default budget of 1.2 · 2 has no room for a third token.
    """
    policy = SpecCache(ratio=0.25, tau_cover=0.6, budget=1.5)
    assert list(policy.spans(np.asarray(NEW_YORK, dtype=np.float32)))[2] == (2, 5)
    assert complete(policy, NEW_YORK) == [2, 3, 4]
    assert complete(SpecCache(ratio=0.25, tau_cover=0.7, budget=1.5), NEW_YORK) == [2, 4]
    assert complete(SpecCache(ratio=0.25, tau_cover=0.6, budget=1.2), NEW_YORK) == [2, 4]
    assert complete(SpecCache(ratio=0.25, tau_cover=0.6, budget=1.5, max_span=1), NEW_YORK) == [2, 4]


def test_over_budget_the_lowest_scores_go() -> None:
    scores = [0.0, 1.0, 0.9, 0.71, 0.72, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert complete(SpecCache(ratio=0.3, tau_cover=0.5, budget=2), scores) == [1, 2, 3, 4, 5]
    assert complete(SpecCache(ratio=0.3, tau_cover=0.5, budget=1.4), scores) == [1, 2, 4, 5]
    assert complete(SpecCache(ratio=0.3, tau_cover=0.5, budget=1), scores) == [1, 2, 5]


@pytest.mark.parametrize("level", [0.0, 3.5])
def test_constant_scores_choose_the_first(level: float) -> None:
    assert complete(SpecCache(ratio=0.15), [level] * 20) == [0, 1, 2]
    assert list(SpecCache().spans(np.full(20, level, dtype=np.float32))) == [(0, 16), (16, 20)]


def test_small_ratios() -> None:
    assert complete(SpecCache(ratio=0), NEW_YORK) == []
    assert complete(SpecCache(ratio=0.001), NEW_YORK) == [2]
    assert complete(SpecCache(ratio=0.15), []) == []


# Links


@cache
def small_module() -> Any:
    return tiny.random_module(tiny.CONFIGS["llama"](), seed=7)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_model(tmp_path_factory.mktemp("small"), tiny.CONFIGS["llama"](), seed=7))


def norms(module: Any, tokens: list[int]) -> torch.Tensor:
    """[layers, n]: L2 norms of what each of transformers' own layers gives."""
    kept: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda *a: kept.append(a[2])) for layer in module.model.layers]
    with torch.no_grad():
        module(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack([(one[0] if isinstance(one, tuple) else one)[0].norm(dim=-1) for one in kept])


@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.15, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3-partial", "gemma2"])
def test_a_link_equals_the_dense_reference(architecture: str, ratio: float, small: str, store: Store) -> None:
    """The same tokenizer: the alignment is the identity, whatever the texts are."""
    one, policy = subject(architecture), SpecCache(ratio, spec_model=small)
    linked = run(one, store, policy, make_chunks(LENGTHS))
    layout = linked.image.layout
    scores = norms(reference.eager(small_module()), layout.tokens.tolist())[-1]
    rows = torch.zeros(layout.num_tokens, dtype=torch.bool)
    wanted = (
        chosen_by_the_paper(scores[: layout.num_context].tolist(), policy) if ratio < 1 else range(layout.num_context)
    )
    rows[list(wanted)] = True
    rows[layout.num_context :] = True
    assert np.array_equal(linked.rows, np.tile(rows.numpy(), (3, 1)))
    assert max_difference(linked, reference.link(one.reference, parts_of(linked), rows)) <= 1e-4
    if 0 < ratio < 1:
        assert linked.scores == pytest.approx(scores.numpy(), rel=1e-4)
    else:
        assert linked.scores is None


@pytest.mark.parametrize(("deep", "layers"), [(1.0, 3), (2 / 3, 2), (1 / 3, 1), (0.0, 1), (0.34, 2)])
def test_deep_layers(deep: float, layers: int, small: str, store: Store) -> None:
    linked = run(subject("llama"), store, SpecCache(0.2, deep=deep, spec_model=small), make_chunks(LENGTHS))
    scores = norms(small_module(), linked.image.layout.tokens.tolist())[-layers:].mean(0)
    assert linked.scores == pytest.approx(scores.numpy(), rel=1e-4)


def test_across_tokenizers(store: Store) -> None:
    """The embedded models: byte-level BPE reads what metaspace BPE chose; aligned here by all pairs of tokens."""
    model, other = load_model("embedded", device="cpu"), load_model("embedded-small", device="cpu")
    policy = make_policy("speccache", {"ratio": 0.2})
    assert isinstance(policy, SpecCache)
    linked = link(model, store, FIXTURES, "Question: who?\nAnswer:", policy, head="<s>")
    texts = ["<s>", *(path.read_text() for path in FIXTURES), "Question: who?\nAnswer:"]
    ids, spans = pieces(other.tokenizer, texts)
    tail = len(other.encode(texts[-1]))
    scores = norms(reference.eager(other.module), ids)[-1][: len(ids) - tail].tolist()
    wanted = [spans[i] for i in chosen_by_the_paper(scores, policy)]
    mine_ids, mine = pieces(model.tokenizer, texts)
    assert mine_ids == linked.image.layout.tokens.tolist()
    num_context = linked.image.layout.num_context
    rows = [any(a < end and start < b for a, b in wanted) for start, end in mine[:num_context]]
    assert linked.rows[0, :num_context].tolist() == rows
    assert 0.1 * num_context < sum(rows) < 0.5 * num_context


def pieces(tokenizer: Any, texts: list[str]) -> tuple[list[int], list[tuple[int, int]]]:
    ids, spans, at = [], [], 0
    for text in texts:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
            ids.append(token)
            spans.append((0, 0) if token in tokenizer.all_special_ids else (at + start, at + end))
        at += len(text)
    return ids, spans


def test_a_model_without_a_speculative_one_is_refused(store: Store) -> None:
    with pytest.raises(InputError, match=r"llama.* --algo speccache:spec_model"):
        run(subject("llama"), store, SpecCache(), make_chunks(LENGTHS))
    run(subject("llama"), store, SpecCache(ratio=1), make_chunks(LENGTHS))


def test_a_prompt_too_long_for_the_speculative_model_is_refused(small: str, store: Store) -> None:
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = 4096
    from pictool.runtime.model import wrap_model

    model = wrap_model(tiny.random_module(config), tiny.tokenizer(), "long")
    with pytest.raises(InputError, match=r"512 .* --algo speccache:spec_model"):
        link(model, store, make_chunks((600,)), TAIL, SpecCache(spec_model=small), head=HEAD)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"deep": -1}, "deep=-1.0"),
        ({"tau_cover": 2}, "tau_cover=2.0"),
        ({"tau_smooth": -0.1}, "tau_smooth=-0.1"),
        ({"max_span": 0}, "max_span=0"),
        ({"budget": 0.5}, "budget=0.5"),
        ({"budget": float("nan")}, "budget=nan"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        make_policy("speccache", fields)
    assert message in str(refused.value)
