"""Two objects compared, against what they were made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pictool.core import Geometry, Target
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from pictool.trace import object_diff
from pictool.trace.object_diff import diff_texts, layer_distances, token_overlap, why_not_comparable

TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(2, 1, 4))


def put(store: Store, tokens: list[int], scale: float = 1.0, sinks: int = 0, target: Target = TARGET) -> str:
    ids = np.asarray(tokens, dtype=np.int32)
    numbers = np.arange(1, 1 + len(tokens) * target.geometry.head_dim, dtype="<f4")
    layer = (numbers * scale).tobytes(), numbers.tobytes()
    meta = ObjectMeta(target.key(ids, sinks, "none", "", 1 if sinks else None), target, len(ids), sinks, "none",
                      dummy=1 if sinks else None)  # fmt: skip
    store.put(CompiledChunk(meta, "text", ids, [layer] * target.geometry.layers))
    return meta.key


def test_the_distance_of_keys_and_values(store: Store) -> None:
    keys = put(store, [1, 2, 3]), put(store, [1, 2, 3], scale=1.5, sinks=2)
    with store.peek(keys[0]) as a, store.peek(keys[1]) as b:
        assert token_overlap(a, b).are_equal and not why_not_comparable(a, b)
        distances = layer_distances(a, b)
    assert [one.key for one in distances] == pytest.approx([0.5, 0.5]) and [one.value for one in distances] == [0, 0]


def test_a_distance_from_nothing(store: Store) -> None:
    keys = put(store, [1], scale=0), put(store, [1], sinks=1)
    with store.peek(keys[0]) as a, store.peek(keys[1]) as b:
        assert layer_distances(a, b)[0].key == float("inf") and layer_distances(a, a)[0].key == 0


@pytest.mark.parametrize(
    ("other", "at_start", "at_end"),
    [
        ([1, 2, 3, 4], 4, 0),
        ([1, 2, 9, 4], 2, 1),
        ([1, 2], 2, 0),
        ([9, 4], 0, 1),
        ([1, 2, 3, 4, 3, 4], 4, 0),
        ([7], 0, 0),
    ],
)
def test_tokens_in_common(store: Store, other: list[int], at_start: int, at_end: int) -> None:
    keys = put(store, [1, 2, 3, 4]), put(store, other, sinks=1)
    with store.peek(keys[0]) as a, store.peek(keys[1]) as b:
        overlap = token_overlap(a, b)
        assert (overlap.at_start, overlap.at_end) == (at_start, at_end)
        assert overlap.are_equal == (other == [1, 2, 3, 4])
        assert why_not_comparable(a, b) == ("" if overlap.are_equal else "the objects have different tokens")


def test_objects_of_other_shapes_are_not_compared(store: Store) -> None:
    other = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(1, 1, 8))
    keys = put(store, [1, 2]), put(store, [1, 2], target=other)
    with store.peek(keys[0]) as a, store.peek(keys[1]) as b:
        assert why_not_comparable(a, b) == "the objects have different geometries"


WORDS = st.lists(st.sampled_from(["the", " ", "\n", "harbour", ".", "é"]), max_size=12).map("".join)


@given(WORDS, WORDS)
def test_the_pieces_of_two_texts_are_the_texts(a: str, b: str) -> None:
    pieces = diff_texts(a, b)
    assert "".join(piece.text for piece in pieces if piece.where in "=-") == a
    assert "".join(piece.text for piece in pieces if piece.where in "=+") == b
    assert all(piece.text for piece in pieces) and (len(pieces) <= 1 or a != b)


def test_long_texts_that_differ_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_diff, "MAX_WORDS", 5)
    words = [(piece.where, piece.text) for piece in diff_texts("a b c d e f!", "a c b d f e!")]
    assert words == [("=", "a "), ("-", "b c d e f"), ("+", "c b d f e"), ("=", "!")]
