"""Prompts of given token ids: objects are linked, over all of their tokens or some, and all else is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tiny
import torch

from pictool.compiler.compile import compile_chunks
from pictool.core import Chunk
from pictool.engines.base import first_token_kl
from pictool.engines.torch import TorchEngine
from pictool.errors import ForeignObjectError, InputError, StoreError
from pictool.linker.link import Linked, link
from pictool.linker.plan import LinkPlan, make_plan, plan_without_objects
from pictool.linker.policies import make_policy, policies
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.recognition.matches import Match
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store

A, B = tuple(range(5, 40)), tuple(range(60, 80))
HEAD, GAP, TAIL = (0, 7, 9), tuple(range(90, 97)), (11, 12, 13)
EVERY = [name for name, policy in policies().items() if policy().needs.objects and name != "speccache"]


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["qwen3"]()), tiny.tokenizer())


def compiled(model: Model, store: Store, *chunks: Sequence[int]) -> list[str]:
    listed = [Chunk("", tuple(chunk), "test") for chunk in chunks]
    return [done.key for done in compile_chunks(model, store, listed)]


def ids(*parts: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def linked(model: Model, store: Store, plan: LinkPlan) -> Linked:
    return link(model, store, Spec.planned(plan))


def logits(result: Linked) -> torch.Tensor:
    assert result.image.logits is not None
    return result.image.logits


@pytest.mark.parametrize("name", EVERY)
def test_a_plan_of_documents_is_the_link_of_them(model: Model, store: Store, name: str) -> None:
    policy: Policy = make_policy(name)
    keys = compiled(model, store, A, B)
    spec = Spec.raw([store.path(key) for key in keys], "?!", policy, "The harbour")
    want = link(model, store, spec)
    tokens, starts = want.image.layout.tokens, want.image.layout.starts
    matches = [Match(key, start, ids(part)) for key, start, part in zip(keys, starts[1:], (A, B), strict=False)]
    got = linked(model, store, make_plan(policy, tokens, matches))
    assert got.image.layout.starts == starts
    assert np.array_equal(got.rows[:, starts[1] :], want.rows[:, starts[1] :]), "the policy's rows"
    assert got.rows[:, : starts[1]].all(), "a head without an object is computed"
    torch.testing.assert_close(logits(got), logits(want), atol=1e-4, rtol=1e-4)


def test_what_no_object_has_is_computed_and_objects_may_be_linked_in_part(model: Model, store: Store) -> None:
    key_a, key_b = compiled(model, store, A, B)
    tokens = ids(HEAD, A[2:], GAP, B[:-3], TAIL)
    at = len(HEAD) + len(A) - 2 + len(GAP)
    matches = [Match(key_a, len(HEAD), ids(A[2:]), 2), Match(key_b, at, ids(B[:-3]))]
    got = linked(model, store, make_plan(make_policy("naive"), tokens, matches))
    rows = np.ones(len(tokens), dtype=bool)
    rows[len(HEAD) : len(HEAD) + len(A) - 2] = rows[at : at + len(B) - 3] = False
    assert all(np.array_equal(layer, rows) for layer in got.rows)
    full = linked(model, store, plan_without_objects(make_policy("full"), tokens))
    keys = [result.image.key(0) for result in (got, full)]
    torch.testing.assert_close(*keys, atol=1e-4, rtol=1e-4)  # rule 3: layer 0 is exact after relocation
    assert first_token_kl(logits(full), logits(got)) > 0


@pytest.mark.parametrize("window", [slice(1, None), slice(9, 31)])
@pytest.mark.parametrize("policy", [make_policy("legolink", {"k": 99}), make_policy("cacheblend", {"ratio": 1})])
def test_all_rows_of_a_window_computed_is_full(model: Model, store: Store, window: slice, policy: Policy) -> None:
    (key,) = compiled(model, store, A)
    tokens, match = ids(HEAD, A[window], TAIL), Match(key, len(HEAD), ids(A[window]), window.start)
    got = linked(model, store, make_plan(policy, tokens, [match]))
    full = linked(model, store, plan_without_objects(make_policy("full"), tokens))
    torch.testing.assert_close(logits(got), logits(full), atol=1e-4, rtol=1e-4)


def test_objects_of_others_are_refused(model: Model, store: Store) -> None:
    (key,) = compiled(model, store, A)
    tokens, naive = ids(HEAD, A, TAIL), make_policy("naive")
    plan = make_plan(naive, tokens, [Match(key, len(HEAD), ids(A))])
    other = model.with_salt("another tenant")
    assert other.stack is model.stack and model.salt == ""
    with pytest.raises(ForeignObjectError, match="salt"):
        linked(other, store, plan)
    with pytest.raises(StoreError, match="f" * 12):
        linked(model, store, make_plan(naive, tokens, [Match("f" * 64, len(HEAD), ids(A))]))
    with pytest.raises(ForeignObjectError, match=f"^object {key[:12]}: "):
        linked(model, store, make_plan(naive, ids(HEAD, B, TAIL), [Match(key, len(HEAD), ids(B))]))
    with pytest.raises(InputError, match="positions"):
        linked(model, store, plan_without_objects(naive, ids(*[A] * 30)))
    with pytest.raises(InputError, match="tokens"):
        plan_without_objects(naive, ids(()))


def test_an_answer_of_a_plan_stores_and_reuses_its_beginning(model: Model, store: Store) -> None:
    plan = plan_without_objects(make_policy("prefix", {"block": 8}), ids(HEAD, A, TAIL))
    with TorchEngine(model, store) as engine:
        first, second = (engine.answer(Spec.planned(plan, 4)) for _ in range(2))
    assert first.generated.tokens == second.generated.tokens
    assert (first.link.recomputed, second.link.recomputed) == (40, 0)
