"""How much of each layer the fusor computes."""

from __future__ import annotations

import pytest
from subjects import LENGTHS, make_chunks, run, subject

from pictool.linker.policies import make_policy
from pictool.store.store import Store


@pytest.mark.parametrize("policy", ["full", "naive", "cacheblend"])
def test_of_the_last_layer_only_the_last_row_is_more_than_k_and_v(policy: str, store: Store) -> None:
    one, chunks, num_rows = subject("llama"), make_chunks(LENGTHS), list[int]()
    run(one, store, make_policy(policy), chunks)  # compiled
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs: num_rows.append(inputs[0].shape[1]))
        for layer in one.model.module.model.layers
    ]
    try:
        linked = run(one, store, make_policy(policy), chunks)
    finally:
        for handle in handles:
            handle.remove()
    # At a checked layer the rows of the next one go on
    assert num_rows == [linked.rows[0].sum(), linked.rows[-1].sum(), 1]
    assert linked.rows[-1].sum() > 1
