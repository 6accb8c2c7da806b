"""Objects located and recognised in prompts by the vLLM connector, against slow and plain searches; without vLLM."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tiny
import vllm_rig as rig
from hypothesis import given
from hypothesis import strategies as st

from pictool.api import compile
from pictool.compiler.compile import object_key
from pictool.core import Chunk
from pictool.engines.vllm.matching import ContentIndex, locate, rolling_hashes
from pictool.errors import InputError
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 9))
def test_locating_is_looking_at_every_place(prompt: list[int], pattern: list[int], at: int) -> None:
    places = [i for i in range(at, len(prompt) - len(pattern) + 1) if prompt[i : i + len(pattern)] == pattern]
    try:
        start: int | None = locate("k", rig.ids(*pattern), rig.ids(*prompt), at).start
    except InputError:
        start = None
    assert start == (places[0] if places else None)


def test_bytes_of_two_tokens_are_no_token() -> None:
    with pytest.raises(InputError, match="not in the prompt"):
        locate("k", rig.ids(0x01000000), rig.ids(0, 1, 0), 0)


# Recognition


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(1, 40))
def test_the_rolling_hash_is_that_of_each_window(tokens: list[int], window: int) -> None:
    if window > len(tokens):
        return
    base = 0x9E3779B97F4A7C15
    want = [
        sum((token + 1) * base**j for j, token in enumerate(tokens[i : i + window])) % 2**64
        for i in range(len(tokens) - window + 1)
    ]
    assert rolling_hashes(rig.ids(*tokens), window).tolist() == want


def index_of(model: Model, store: Store, *chunks: Chunk, min_tokens: int = 2) -> ContentIndex:
    compile(model, store, chunks)
    index = ContentIndex(store, model.target, min_tokens)
    index.refresh()
    return index


def places(index: ContentIndex, *tokens: int) -> list[tuple[int, int]]:
    return [(match.start, match.end) for match in index.find(rig.ids(*tokens), 0)]


def test_whole_chunks_are_found_the_longest_first_without_overlaps(model: Model, store: Store) -> None:
    index = index_of(model, store, rig.chunk(5, 6, 7), rig.chunk(5, 6, 7, 8), rig.chunk(8, 9), rig.chunk(3))
    assert places(index, 1, 5, 6, 7, 8, 9, 5, 6, 7, 3) == [(1, 5), (6, 9)]
    assert places(index, 5, 6, 7, 9, 8, 9) == [(0, 3), (4, 6)]
    assert places(index, 5, 6) == places(index) == places(index, 3) == []


def test_only_objects_after_the_model_s_own_dummy_token_are_found(model: Model, store: Store) -> None:
    index = index_of(model, store)
    compile(model, store, [rig.chunk(5, 6, 7)], sinks=2)
    index.refresh()
    assert model.bos_id is not None
    assert len(index.find(rig.ids(1, 5, 6, 7), 2, dummy=model.bos_id)) == 1
    assert index.find(rig.ids(1, 5, 6, 7), 2, dummy=model.bos_id + 1) == []
    assert index.find(rig.ids(1, 5, 6, 7), 0, dummy=model.bos_id) == []


@given(st.lists(st.integers(3, 5), max_size=60))
def test_finding_is_looking_at_every_place(tokens: list[int]) -> None:
    """Every place of an object is taken by it, or by one that is as long at least."""
    known = [(3, 4, 5), (3, 3), (4, 4, 4, 4, 4), (5, 4, 3, 3, 4, 5, 3)]
    taken = places(_known(), *tokens)
    for start, end in taken:
        assert tuple(tokens[start:end]) in known
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    for chunk in known:
        for at in range(len(tokens) - len(chunk) + 1):
            if tuple(tokens[at : at + len(chunk)]) == chunk:
                over = [end - start for start, end in taken if start < at + len(chunk) and at < end]
                assert over and max(over) >= len(chunk)


_KNOWN: list[ContentIndex] = []


def _known() -> ContentIndex:
    if not _KNOWN:
        import tempfile

        model = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())
        store = Store(Path(tempfile.mkdtemp(prefix="pic-index-")))
        chunks = [rig.chunk(3, 4, 5), rig.chunk(3, 3), rig.chunk(4, 4, 4, 4, 4), rig.chunk(5, 4, 3, 3, 4, 5, 3)]
        _KNOWN.append(index_of(model, store, *chunks))
    return _KNOWN[0]


def test_equal_hashes_are_no_match(model: Model, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that is always the same, only the tokens decide."""
    import pictool.engines.vllm.matching as module

    monkeypatch.setattr(
        module, "rolling_hashes", lambda tokens, window: np.zeros(len(tokens) - window + 1, dtype=np.uint64)
    )
    index = index_of(model, store, rig.chunk(5, 6, 7), rig.chunk(7, 6, 5))
    assert places(index, 5, 6, 8, 7, 6, 5, 6, 7) == [(3, 6)]


def test_the_index_follows_the_store(model: Model, store: Store) -> None:
    first, second = rig.chunk(5, 6, 7), rig.chunk(8, 9)
    index = index_of(model, store, first)
    compile(model, store, [second])
    assert places(index, 5, 6, 7, 8, 9) == [(0, 3)]
    index.refresh()
    assert places(index, 5, 6, 7, 8, 9) == [(0, 3), (3, 5)]
    store.path(object_key(model, first)).unlink()
    index.refresh()
    assert places(index, 5, 6, 7, 8, 9) == [(3, 5)]
    index.forget(object_key(model, second))
    assert places(index, 5, 6, 7, 8, 9) == []


def test_objects_of_another_model_are_not_found(model: Model, store: Store) -> None:
    other = wrap_model(tiny.random_module(tiny.CONFIGS["llama"](), seed=1), tiny.tokenizer())
    compile(other, store, [rig.chunk(5, 6, 7)])
    assert places(index_of(model, store, rig.chunk(8, 9)), 5, 6, 7, 8, 9) == [(3, 5)]
