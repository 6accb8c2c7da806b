"""Small compiled chunks for the tests of the store, made without a model."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pictool.core import Contexts, Geometry, Target
from pictool.store.directory import MARK
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store

TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(layers=2, kv_heads=1, head_dim=4))


def make_chunk(seed: int, num_tokens: int = 5) -> CompiledChunk:
    """A chunk of its own for every seed."""
    tokens = np.arange(num_tokens, dtype=np.int32) + seed
    part = np.full(4 * num_tokens, seed, dtype=np.float32).tobytes()
    meta = ObjectMeta(TARGET.key(tokens, "none"), TARGET, num_tokens, "none")
    return CompiledChunk(meta, f"text {seed}", tokens, [(part, part)] * 2)


def forged(chunk: CompiledChunk, key: str) -> CompiledChunk:
    """The chunk under the key of another: all checksums of its object hold."""
    return replace(chunk, meta=replace(chunk.meta, key=key))


def put_many(store: Store, count: int) -> list[str]:
    """Objects of equal size that were used in this order, a minute apart, the last one an hour ago."""
    keys = []
    for seed in range(count):
        path = store.put(make_chunk(seed))
        keys.append(path.stem)
        set_age(path, 3600 + 60 * (count - seed))
    return keys


def set_age(path: Path, seconds: float) -> None:
    """Make it last used so long ago."""
    now = time.time()
    os.utime(path, (now - seconds, now - seconds))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def size_of_one(store: Store) -> int:
    """Bytes of any one object; `put_many` makes them equal."""
    return store.path(store.keys()[0]).stat().st_size


def content(store: Store) -> dict[str, bytes]:
    """The bytes of every object's file."""
    return {key: store.path(key).read_bytes() for key in store.keys()}


def litter(store: Store) -> list[Path]:
    """Temp files."""
    return list((store.root / "tmp").iterdir()) if (store.root / "tmp").is_dir() else []


def files(root: Path) -> list[Path]:
    """All files under a directory, but for a store's lock and mark."""
    return [path for path in root.rglob("*") if not path.is_dir() and path.name not in ("lock", MARK)]


def chunk_of(
    tokens: Sequence[int], target: Target = TARGET, *, after: Contexts = (), salt: str = "",
    codec: str = "none", parent: str | None = None,
) -> CompiledChunk:  # fmt: skip
    """A chunk of given tokens; with `parent`, a block of a prefix chain."""
    ids, geometry = np.asarray(tokens, dtype=np.int32), target.geometry
    part = bytes(4 * len(ids) * geometry.kv_heads * geometry.head_dim)
    own = target.identify(ids, codec, salt, after=after)
    if parent is not None:
        own = target.identify_block(ids, parent)
    rotation = None if parent is None else ""
    meta = ObjectMeta(
        own.key, target, len(ids), codec, parent=parent, rotation=rotation, salted=own.salted, after=after
    )
    return CompiledChunk(meta, f"tokens {len(ids)}", ids, [(part, part)] * geometry.layers)


def put_tokens(store: Store, tokens: Sequence[int], **options: Any) -> str:
    """Store an object of given tokens; its key."""
    return store.put(chunk_of(tokens, **options), durable=False).stem
