"""Codecs: what comes back, how far it may be from what went in, and that nothing else is taken for coded KV."""

from __future__ import annotations

import ast
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from chunks import TARGET
from hypothesis import given, settings
from hypothesis import strategies as st

from pictool.core import Geometry
from pictool.errors import InputError, ObjectError
from pictool.store.codecs import codecs, require_codec
from pictool.store.codecs.base import Codec, CodingError, LayerShape
from pictool.store.codecs.float8 import Float8E4M3Head
from pictool.store.codecs.fp8 import from_fp8, to_fp8
from pictool.store.codecs.quantized import GROUP, Quantizing
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta, write_object
from pictool.store.store import Store

NAMES = list(codecs())
LOSSY = [name for name in NAMES if isinstance(codecs()[name], Quantizing)]
LOSSLESS = [name for name in NAMES if name not in LOSSY]  # of keys and values
DTYPES = ["float32", "bfloat16", "float16"]


def random_layer(shape: LayerShape, seed: int = 0) -> tuple[bytes, bytes]:
    """Keys with channels that are large throughout, values with tokens that are."""
    draw = torch.Generator().manual_seed(seed)
    key = torch.randn(shape.dims, generator=draw) * torch.exp(torch.randn(shape.dims[2], generator=draw)) + 0.3
    value = torch.randn(shape.dims, generator=draw) * torch.exp(torch.randn(shape.dims[1], 1, generator=draw))
    return to_bytes(key, shape), to_bytes(value, shape)


def to_bytes(numbers: torch.Tensor, shape: LayerShape) -> bytes:
    data = numbers.to(getattr(torch, shape.dtype)).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert isinstance(data, bytes)
    return data


def floats(data: bytes, shape: LayerShape) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, shape.dtype)).float().view(shape.dims)


def round_trip(codec: Codec, pair: tuple[bytes, bytes], shape: LayerShape) -> tuple[bytes, bytes]:
    out = bytearray(shape.num_bytes)
    codec.decode(memoryview(codec.encode(*pair, shape)), shape, memoryview(out))
    return bytes(out[: len(out) // 2]), bytes(out[len(out) // 2 :])


SHAPES = [(1, 1, 1), (2, 3, 8), (2, GROUP, 32), (1, GROUP + 1, 80), (3, 3 * GROUP - 1, 128), (2, 200, 96), (1, 70, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_codecs_return_the_same_bits(name: str, dims: tuple[int, int, int], dtype: str) -> None:
    shape = LayerShape(*dims, dtype)
    pair = random_layer(shape)
    assert round_trip(codecs()[name], pair, shape) == pair


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_codecs_keep_bits_that_are_no_numbers(name: str) -> None:
    shape = LayerShape(2, 40, 16, "bfloat16")
    pair = np.random.default_rng(0).bytes(shape.num_bytes // 2), b"\xff" * (shape.num_bytes // 2)
    assert round_trip(codecs()[name], pair, shape) == pair


def step(name: str, group: torch.Tensor, axis: int | tuple[int, ...]) -> torch.Tensor:
    """By how much a number of a group may be off: half a step, and what the scale's eight bits add."""
    top = group.abs().amax(axis, keepdim=True)
    if name == "int8":
        return top / 127 * 0.51
    if name == "int4":
        return (group.amax(axis, keepdim=True) - group.amin(axis, keepdim=True) + 0.02 * top) / 15 * 0.52
    return torch.maximum(group.abs() / 16 * 1.02, top / 448 / 512)  # fp8: half of the last of three bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_are_off_by_half_a_step_of_the_group(name: str, dims: tuple[int, int, int], dtype: str) -> None:
    shape = LayerShape(*dims, dtype)
    pair = random_layer(shape)
    back = round_trip(codecs()[name], pair, shape)
    before, after = ([floats(part, shape) for part in kv] for kv in (pair, back))
    codec = codecs()[name]
    assert isinstance(codec, Quantizing)
    for layout in codec.layouts(shape):
        was, now = (
            numbers[layout.part][:, layout.start : layout.end].reshape(layout.codes) for numbers in (before, after)
        )
        rounding = was.abs() * {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[dtype] + 1e-7
        assert bool(((was - now).abs() <= step(name, was, layout.axis) + rounding).all())


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("name", LOSSY)
def test_groups_cover_every_number_once(name: str, dims: tuple[int, int, int]) -> None:
    shape, codec = LayerShape(*dims, "float32"), codecs()[name]
    assert isinstance(codec, Quantizing)
    for part in (0, 1):
        spans = [(layout.start, layout.end) for layout in codec.layouts(shape) if layout.part == part]
        assert [token for start, end in spans for token in range(start, end)] == list(range(dims[1]))
    assert sum(int(np.prod(layout.codes)) for layout in codec.layouts(shape)) == shape.count


@pytest.mark.parametrize(("name", "scales"), [("float8_e4m3", 1), ("float8_e4m3_head", 3)])
def test_float8_has_one_scale_for_the_keys_of_a_layer_or_head(name: str, scales: int) -> None:
    """As vLLM's KV cache of dtype fp8: the codes are those that torch makes of keys over that scale."""
    shape = LayerShape(3, 70, 8, "float32")
    key, value = random_layer(shape)
    codec = codecs()[name]
    assert isinstance(codec, Quantizing)
    pieces = dict(codec.pieces(memoryview(codec.encode(key, value, shape)), shape))
    for part, numbers in enumerate((floats(key, shape), floats(value, shape))):
        scale = torch.from_numpy(pieces[part].scale)
        assert len(set(scale.flatten().tolist())) == scales
        wanted = (numbers / scale[:, :, 0]).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(torch.from_numpy(pieces[part].codes.copy())[:, :, 0], wanted)


def test_float8_is_unpacked_to_codes_and_scales_of_heads() -> None:
    shape, codec = LayerShape(3, 70, 8, "float32"), Float8E4M3Head()
    coded = memoryview(codec.encode(*random_layer(shape), shape))
    unpacked, out = bytearray(codec.unpacked_bytes(shape)), bytearray(shape.num_bytes)
    codec.unpack(coded, shape, memoryview(unpacked))
    codec.decode(coded, shape, memoryview(out))
    codes, scales = torch.split(torch.frombuffer(unpacked, dtype=torch.uint8), [shape.count, 4 * 2 * 3])
    numbers = codes.view(torch.float8_e4m3fn).float().view(2 * 3, -1) * scales.view(torch.float32)[:, None]
    assert torch.equal(numbers.ravel(), torch.frombuffer(out, dtype=torch.float32))


@pytest.mark.parametrize("name", LOSSY)
def test_the_numpy_decoder_is_what_torch_computes_from_the_pieces(name: str) -> None:
    """An independent path: codes, scales and offsets put together in torch, rounded by torch."""
    shape = LayerShape(2, 150, 32, "bfloat16")
    codec = codecs()[name]
    assert isinstance(codec, Quantizing)
    coded = memoryview(codec.encode(*random_layer(shape), shape))
    out = bytearray(shape.num_bytes)
    codec.decode(coded, shape, memoryview(out))
    expected = torch.frombuffer(out, dtype=torch.bfloat16).view(2, *shape.dims)
    for part, piece in codec.pieces(coded, shape):
        codes = torch.from_numpy(piece.codes.copy())
        numbers = codes.view(torch.float8_e4m3fn).float() if codec.is_float8 else codes.float()
        sums = numbers * torch.from_numpy(piece.scale)
        if piece.offset is not None:
            sums += torch.from_numpy(piece.offset)
        target = expected[part, :, piece.start : piece.end].reshape(sums.shape)
        assert torch.equal(sums.bfloat16(), target)


def test_the_numbers_of_fp8_are_torch_s() -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), torch.from_numpy(from_fp8(codes.numpy())))
    between = from_fp8(codes.numpy())
    ties = between[1:] / 2 + between[:-1] / 2
    numbers = np.concatenate([np.linspace(-448, 448, 9999), np.linspace(-0.1, 0.1, 9999), ties])
    theirs = torch.from_numpy(numbers.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_fp8(numbers.astype(np.float32)), theirs)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 3e30])
@pytest.mark.parametrize("name", LOSSY)
def test_constant_kv_comes_back_almost_as_it_was(name: str, value: float) -> None:
    shape = LayerShape(2, 70, 8, "float32")
    numbers = torch.full(shape.dims, value)
    key, _ = round_trip(codecs()[name], (to_bytes(numbers, shape), to_bytes(numbers, shape)), shape)
    assert torch.allclose(floats(key, shape), numbers, rtol=2e-2, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_is_refused(store: Store, name: str, bad: float) -> None:
    chunk = make_object(name)
    key = np.frombuffer(chunk.layers[0][0], dtype=np.float32).copy()
    key[3] = bad
    with pytest.raises(InputError, match=name):
        store.put(replace(chunk, layers=[(key.tobytes(), chunk.layers[0][1]), *chunk.layers[1:]]))
    assert store.keys() == []


@pytest.mark.parametrize("name", NAMES)
def test_the_same_layer_gives_the_same_bytes(name: str) -> None:
    shape = LayerShape(2, 100, 32, "bfloat16")
    assert codecs()[name].encode(*random_layer(shape), shape) == codecs()[name].encode(*random_layer(shape), shape)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_any_truncation_or_addition_is_refused(name: str) -> None:
    shape = LayerShape(1, 20, 4, "bfloat16")
    codec, out = codecs()[name], memoryview(bytearray(shape.num_bytes))
    whole = codec.encode(*random_layer(shape), shape)
    for data in [whole[:size] for size in range(len(whole))] + [whole + b"\0", whole + whole]:
        with pytest.raises(CodingError):
            codec.decode(memoryview(data), shape, out)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
@given(data=st.data())
@settings(max_examples=60, deadline=None, database=None)
def test_any_mutation_is_decoded_or_refused(name: str, data: st.DataObject) -> None:
    """Behind the checksum: whatever a foreign writer wrote, it is a CodingError or numbers, and no crash."""
    shape = LayerShape(2, 9, 4, "bfloat16")
    codec = codecs()[name]
    coded = bytearray(codec.encode(*random_layer(shape), shape))
    for _ in range(data.draw(st.integers(1, 4))):
        coded[data.draw(st.integers(0, len(coded) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode(memoryview(bytes(coded)), shape, memoryview(bytearray(shape.num_bytes)))
    except CodingError as error:
        assert "\n" not in str(error)


def test_a_frame_that_says_another_size_is_refused_before_it_is_unpacked() -> None:
    shape = LayerShape(1, 20, 4, "bfloat16")
    bomb = zstandard.compress(bytes(1 << 26))
    data = struct.pack("<I", len(bomb)) + bomb
    with pytest.raises(CodingError):
        codecs()["zstd"].decode(memoryview(data * 2), shape, memoryview(bytearray(shape.num_bytes)))


# In objects


def make_object(codec: str, dtype: str = "float32", tokens: int = 30) -> CompiledChunk:
    target = replace(TARGET, dtype=dtype, geometry=Geometry(2, 2, 8))
    ids = np.arange(tokens, dtype=np.int32)
    meta = ObjectMeta(target.key(ids, codec), target, tokens, codec)
    return CompiledChunk(meta, "coded", ids, [random_layer(meta.shape, seed) for seed in range(2)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_objects_of_every_codec(store: Store, name: str, dtype: str) -> None:
    chunk = make_object(name, dtype)
    path = store.put(chunk)
    with store.peek(chunk.meta.key) as file:
        file.verify()
        assert file.meta == chunk.meta and file.text() == "coded" and file.tokens().tolist() == list(range(30))
        for index, pair in enumerate(chunk.layers):
            key, value = file.layer(index)
            assert (bytes(key), bytes(value)) == round_trip(
                codecs()[name], (bytes(pair[0]), bytes(pair[1])), chunk.meta.shape
            )
            assert file.layer_bytes == len(key) + len(value) and len(file.stored_layer(index)) == file.stored_bytes(
                index
            )
    assert store.put(chunk).read_bytes() == path.read_bytes()


def test_the_codec_is_part_of_the_key() -> None:
    assert len({make_object(name).meta.key for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_every_flipped_byte_of_a_coded_object_is_refused(store: Store, name: str) -> None:
    path = store.put(make_object(name, "bfloat16", 4))
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :])
        with pytest.raises(ObjectError), ObjectFile(path) as file:
            file.verify()


class Wrong(Codec):
    """Writes what no decoder takes."""

    is_lossless = True

    def encode(self, key: object, value: object, shape: LayerShape) -> bytes:
        return b"x" * 40

    def decode(self, data: memoryview, shape: LayerShape, out: memoryview) -> None:
        raise AssertionError


def test_a_layer_that_cannot_be_decoded_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pictool.store.objects.format.codecs", lambda: dict.fromkeys(NAMES, Wrong()))
        with (tmp_path / "odd.kvo").open("wb") as out:
            write_object(out, make_object("int8"))
    with ObjectFile(tmp_path / "odd.kvo") as file, pytest.raises(ObjectError, match=r"odd\.kvo: layer 0 "):
        file.layer(0)


def test_an_unknown_codec_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="codec 'int3': "):
        require_codec("int3")


def test_codecs_know_numpy_and_zstd_only() -> None:
    for path in (Path(__file__).parents[3] / "pictool" / "store" / "codecs").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Import) and {name.name for name in node.names} & {"torch", "transformers"})
