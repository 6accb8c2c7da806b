"""Keys of objects: what they follow from, byte for byte."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from pictool.core import Geometry, Target

TOKENS = np.arange(5, dtype=np.int32)


def target(dtype: str) -> Target:
    return Target("LlamaForCausalLM", "a" * 64, "b" * 64, dtype, Geometry(2, 1, 4))


def key_by_hand(dtype: str, **more: object) -> str:
    """As docs/reference/formats.md describes it."""
    named = {
        "architecture": "LlamaForCausalLM", "model": "a" * 64, "tokenizer": "b" * 64, "dtype": dtype,
        "geometry": {"layers": 2, "kv_heads": 1, "head_dim": 4}, "sinks": 0, "codec": "none", **more,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode() + TOKENS.astype("<i4").tobytes()).hexdigest()


def test_a_key_is_the_hash_of_what_determines_the_content() -> None:
    assert target("float32").key(TOKENS, "none") == key_by_hand("float32")


def test_objects_of_rounded_frequencies_are_never_found() -> None:
    """In half precision RoPE's frequencies were rounded once; the same text has another key since."""
    for dtype in ("bfloat16", "float16"):
        key = target(dtype).key(TOKENS, "none")
        assert key == key_by_hand(dtype, frequencies="float32") != key_by_hand(dtype)
