"""Objects of models that keep something else than keys and values: latents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chunks import TARGET

from pictool.core import Geometry, KVPart
from pictool.errors import ObjectError
from pictool.store.codecs import codecs
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta, canonical, metadata_of, seal
from pictool.store.objects.header import HeaderError, meta_of
from pictool.store.store import Store

LATENT, ROPE = KVPart("latent", 1, 24, False), KVPart("rope_key", 1, 8, True)
LATENTS = replace(TARGET, geometry=Geometry(2, others=(LATENT, ROPE)))
TOKENS = np.arange(70, dtype=np.int32)


def chunk_of(codec: str) -> CompiledChunk:
    meta = ObjectMeta(LATENTS.key(TOKENS, codec), LATENTS, len(TOKENS), codec)
    draw = np.random.default_rng(0)
    layers = [tuple(draw.normal(size=dims).astype("<f4").tobytes() for dims in meta.shape.part_dims) for _ in range(2)]
    return CompiledChunk(meta, "a text", TOKENS, layers)


@pytest.mark.parametrize("codec", codecs())
def test_an_object_of_latents_holds_what_was_written(store: Store, codec: str) -> None:
    chunk = chunk_of(codec)
    with ObjectFile(store.put(chunk)) as file:
        file.verify()
        assert file.meta == chunk.meta
        assert file.layer_bytes == 70 * (24 + 8) * 4
        for index, parts in enumerate(chunk.layers):
            for got, wanted in zip(file.layer(index), parts, strict=True):
                numbers, expected = np.frombuffer(got, "<f4"), np.frombuffer(wanted, "<f4")
                assert len(numbers) == len(expected)
                tolerance = 0.0 if codecs()[codec].is_lossless else 0.5
                assert float(np.abs(numbers - expected).max()) <= tolerance


def test_any_reader_of_safetensors_sees_the_parts(store: Store) -> None:
    from safetensors.numpy import load_file

    chunk = chunk_of("none")
    tensors = load_file(store.put(chunk))
    assert tensors["layers.000.latent"].shape == (1, 70, 24)
    assert tensors["layers.001.rope_key"].tobytes() == chunk.layers[1][1]
    assert "layers.000.key" not in tensors


def test_the_parts_are_part_of_the_key() -> None:
    wider = replace(LATENTS, geometry=Geometry(2, others=(replace(LATENT, width=25), ROPE)))
    turned = replace(
        LATENTS, geometry=Geometry(2, others=(replace(LATENT, rotated=True), replace(ROPE, rotated=False)))
    )
    assert len({target.key(TOKENS, "none") for target in (LATENTS, wider, turned)}) == 3


WRONG = {
    "two rotated": (replace(LATENT, rotated=True), ROPE),
    "none rotated": (LATENT, replace(ROPE, rotated=False)),
    "one part": (ROPE,),
    "three parts": (LATENT, ROPE, replace(LATENT, name="index")),
    "a name twice": (LATENT, replace(ROPE, name="latent")),
    "the coded name": (replace(LATENT, name="kv"), ROPE),
    "another unit": (replace(LATENT, unit="block"), ROPE),
    "no width": (replace(LATENT, width=0), ROPE),
    "a bomb": (replace(LATENT, heads=1 << 16), ROPE),
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
def test_parts_that_no_model_has_are_refused(parts: tuple[KVPart, ...]) -> None:
    meta = chunk_of("none").meta
    forged = replace(meta, target=replace(LATENTS, geometry=Geometry(2, others=parts)))
    with pytest.raises(HeaderError):
        meta_of(metadata_of(forged, {}))


def test_a_header_says_either_parts_or_heads(store: Store, tmp_path: Path) -> None:
    """Even if it is sealed anew."""
    import json
    import struct

    whole = Path(store.put(chunk_of("none"))).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"] |= {"kv_heads": "1", "head_dim": "16"}
    header["__metadata__"]["header"] = seal(header)
    raw = canonical(header)
    forged = tmp_path / "forged.kvo"
    forged.write_bytes(struct.pack("<Q", len(raw)) + raw + whole[8 + length :])
    with pytest.raises(ObjectError):
        ObjectFile(forged)
