"""The default policy: prophet where attention is shown and reuse pays, everything below, legolink elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from alone import link
from subjects import HEAD, TAIL, make_chunks, subject

from pictool.engines.vllm.request import parse_policy
from pictool.errors import InputError
from pictool.linker.policies import DEFAULT, make_policy
from pictool.linker.policies.auto import FEW
from pictool.linker.spec import Spec
from pictool.store.store import Store


@pytest.mark.parametrize(("tokens", "prophet"), [(FEW - 1, 1.0), (FEW, 0.15), (399, 0.15), (400, 0.10)])
def test_a_short_context_is_computed_in_full_and_a_longer_one_as_by_prophet(
    tokens: int, prophet: float, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pictool.linker.policies.auto.SHORT", 400)
    model = subject("llama").model
    size = tokens - len(model.encode(Spec.raw((), TAIL, make_policy("full"), HEAD).frame(model).head))
    chunks = make_chunks((size // 2, size - size // 2))
    policies = make_policy("auto"), make_policy("prophet", {"ratio": prophet})
    auto, wanted = (link(model, store, chunks, TAIL, policy, head=HEAD) for policy in policies)
    assert auto.image.layout.num_context == tokens
    assert np.array_equal(auto.rows, wanted.rows) and wanted.rows.all() == (prophet == 1)


def test_legolink_takes_its_place_for_a_hybrid_and_in_vllm(store: Store) -> None:
    auto, legolink = make_policy(DEFAULT), make_policy("legolink", {"k": 16})
    bamba = subject("bamba").model
    assert bamba.linkable(auto) == legolink and subject("llama").model.linkable(auto) == auto
    linked = link(bamba, store, make_chunks((40, 41)), TAIL, auto, head=HEAD)
    assert linked.policy == legolink
    assert parse_policy(DEFAULT) == legolink == auto.without_attention
    with pytest.raises(InputError, match=r"^prophet: "):
        bamba.linkable(make_policy("prophet"))
