"""The rows of a forward inside vLLM as micro-batches of runs; without vLLM."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pictool.engines.vllm.worker.forward import RowSet


@given(st.lists(st.lists(st.booleans(), max_size=30), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 12))
def test_micro_batches_are_the_rows_in_order(masks: list[list[bool]], limit: int, piece: int) -> None:
    rows = RowSet.of([np.asarray(mask, dtype=bool) for mask in masks])
    want = [(owner, at) for owner, mask in enumerate(masks) for at, on in enumerate(mask) if on]
    assert list(zip(rows.owner.tolist(), rows.position.tolist(), strict=True)) == want
    seen: list[tuple[int, int]] = []
    micro_batches = [
        part.micro_batch(first, min(first + piece, len(part)))
        for part in rows.parts(limit)
        for first in range(0, len(part), piece)
    ]
    before_part = np.repeat(np.arange(0, len(want), limit), [-(-len(part) // piece) for part in rows.parts(limit)])
    for micro_batch, offset in zip(micro_batches, before_part, strict=True):
        runs = zip(micro_batch.owner.tolist(), micro_batch.start.tolist(), micro_batch.end.tolist(), strict=True)
        computed = [(owner, at) for owner, start, end in runs for at in range(start, end)]
        assert computed == [want[offset + i] for i in micro_batch.index.tolist()] and len(computed) <= min(limit, piece)
        run, position = micro_batch.rows()
        assert position.tolist() == [at for _, at in computed]
        assert [(int(micro_batch.owner[of]), at) for of, at in zip(run, position.tolist(), strict=True)] == computed
        lengths = (micro_batch.end - micro_batch.start).tolist()
        assert lengths == sorted(lengths) and min(lengths) > 0
        before = dict(sorted(seen))
        assert all(before.get(owner, -1) < at for owner, at in computed), "a row before one of an earlier forward"
        seen += computed
    assert sorted(seen) == want
