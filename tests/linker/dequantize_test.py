"""Coded objects in a link: the loader brings what the store's own decoder gives, and nothing damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from alone import compile, link
from chunks import TARGET
from subjects import HEAD, TAIL, make_chunks, subject

from pictool.core import Geometry, Layout
from pictool.errors import ObjectError
from pictool.linker.dequantize import is_quantized, read_quantized
from pictool.linker.loader import Loader, Loads, PlacedObject
from pictool.linker.policies import make_policy
from pictool.runtime.memory.image import Image
from pictool.runtime.tensors import from_bytes, to_bytes
from pictool.store.codecs import codecs
from pictool.store.codecs.quantized import Quantizing
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.store import Store

LOSSY = [name for name, codec in codecs().items() if isinstance(codec, Quantizing)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", LOSSY)
def test_torch_gives_the_bits_of_the_store_s_decoder(store: Store, name: str, dtype: str) -> None:
    target = replace(TARGET, dtype=dtype, geometry=Geometry(1, 2, 96))
    tokens = np.arange(150, dtype=np.int32)
    meta = ObjectMeta(target.key(tokens, name), target, len(tokens), name)
    torch.manual_seed(0)
    key, value = (torch.randn(2, *meta.shape.dims) * 3).to(getattr(torch, dtype))
    path = store.put(CompiledChunk(meta, "", tokens, [(to_bytes(key), to_bytes(value))]))
    with ObjectFile(path) as file:
        assert is_quantized(file)
        mine = read_quantized(file, 0, key.dtype, torch.device("cpu"))
        for found, wanted in zip(mine, file.layer(0), strict=True):
            assert torch.equal(found, from_bytes(wanted, key.dtype, meta.shape.dims))


@pytest.mark.parametrize("codec", codecs())
def test_the_loader_places_what_the_object_holds(store: Store, codec: str) -> None:
    model, (chunk,) = subject("llama").model, make_chunks((29,))
    (done,) = compile(model, store, [chunk], codec=codec)
    image = Image(model.stack, Layout.of([], [chunk.tokens], [5]))
    with Loader(Loads(image, [PlacedObject(ObjectFile(done.path), 0)])) as loader, ObjectFile(done.path) as file:
        for layer in range(model.stack.num_layers):
            loader.synchronize(layer)
            value = from_bytes(file.layer(layer)[1], torch.float32, file.meta.shape.dims)
            assert torch.equal(image.value(layer)[0, :, :29], value)
        assert loader.bytes_read == sum(file.stored_bytes(layer) for layer in range(model.stack.num_layers))


@pytest.mark.parametrize(("codec", "tolerance"), [("zstd", 0.0), ("int8", 0.05), ("fp8", 0.3), ("int4", 1.0)])
@pytest.mark.parametrize("policy", ["naive", "legolink", "cacheblend"])
def test_a_link_of_coded_objects_is_near_that_of_plain_ones(
    store: Store, policy: str, codec: str, tolerance: float
) -> None:
    one, chunks = subject("llama"), make_chunks((29, 17))
    plain, coded = (
        link(one.model, store, chunks, TAIL, make_policy(policy, {}), head=HEAD, codec=name) for name in ("none", codec)
    )
    assert plain.image.logits is not None and coded.image.logits is not None
    assert float((plain.image.logits - coded.image.logits).abs().max()) <= tolerance
    head = plain.image.layout.head[1]
    assert torch.equal(plain.image.key(2)[:, :, :head], coded.image.key(2)[:, :, :head])  # lossless under any codec


@pytest.mark.parametrize("codec", codecs())
def test_damage_in_a_coded_layer_ends_the_link(store: Store, codec: str) -> None:
    """Of an object that was named as a file, so that there is no text to compile in its place."""
    one, chunks = subject("llama"), make_chunks((29,))
    (done,) = compile(one.model, store, chunks, codec=codec)
    whole = bytearray(done.path.read_bytes())
    whole[-len(chunks[0].text.encode()) - 30] ^= 1
    done.path.write_bytes(whole)
    with pytest.raises(ObjectError, match=f"^{done.path}: layer 2 "):
        link(one.model, store, [done.path], TAIL, make_policy("naive", {}), codec=codec)
