"""The object file: its bytes, what other readers see in it, and that nothing damaged or foreign gets through."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from pictool.core import Contexts, Geometry, Target
from pictool.errors import ForeignObjectError, ObjectError
from pictool.store.objects.format import DTYPES, CompiledChunk, ObjectFile, ObjectMeta, encode_object, write_object
from pictool.store.objects.format import canonical as _canonical
from pictool.store.objects.format import seal as _seal

TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(layers=1, kv_heads=2, head_dim=2))
TOKENS, TEXT = (5, 3, 260), "naïve 東京 🙂"
NUMBERS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}  # numpy has no bfloat16


def make_chunk(
    tokens: tuple[int, ...] = TOKENS, text: str = TEXT, target: Target = TARGET, after: Contexts = ()
) -> CompiledChunk:
    """A chunk whose numbers are 0, 1, 2, … over all layers, keys before values."""
    ids, geometry = np.asarray(tokens, dtype=np.int32), target.geometry
    size = geometry.kv_heads * len(tokens) * geometry.head_dim
    parts = np.arange(2 * geometry.layers * size).astype(NUMBERS[target.dtype]).reshape(geometry.layers, 2, size)
    meta = ObjectMeta(target.key(ids, "none", after=after), target, len(tokens), "none", after=after)
    return CompiledChunk(meta, text, ids, [(key.tobytes(), value.tobytes()) for key, value in parts])


def write(path: Path, chunk: CompiledChunk) -> Path:
    with path.open("wb") as file:
        write_object(file, chunk)
    return path


def read(path: Path) -> tuple[ObjectMeta, str, list[int], list[tuple[bytes, bytes]]]:
    """Everything, with every checksum."""
    with ObjectFile(path) as file:
        file.verify()
        layers = [file.layer(index) for index in range(file.meta.target.geometry.layers)]
        return file.meta, file.text(), file.tokens().tolist(), [(bytes(key), bytes(value)) for key, value in layers]


def content(chunk: CompiledChunk) -> tuple[ObjectMeta, str, list[int], list[tuple[bytes, bytes]]]:
    return chunk.meta, chunk.text, np.asarray(chunk.tokens).tolist(), [(bytes(k), bytes(v)) for k, v in chunk.layers]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + struct.unpack_from("<Q", data)[0]
    return json.loads(data[8:end]), data[end:]


def sealed(header: dict[str, Any], body: bytes) -> bytes:
    """A file whose header is what someone made of it, but canonical and with a checksum that holds."""
    header["__metadata__"]["header"] = _seal(header)
    raw = _canonical(header)
    return struct.pack("<Q", len(raw)) + raw + body


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "one.kvo", make_chunk())


# If one of these two changes, objects that users have are no longer read: bump VERSION, so that they are refused by
# name, and write the new bytes down here. Never change them with the version left as it is.
GOLDEN_HEADER = (
    '{"__metadata__":{"architecture":"LlamaForCausalLM","checksums":"{'
    '\\"layers\\": [\\"7ee97df001c5c4f4d73390d7c4aaebb59e0ddc6c906641bf75740f3541872db6\\"], '
    '\\"text\\": \\"1e1ff7c38d98ab68cc0b76b327cdb6bf7371a36cfb751a4f7bc2c73dd5cf11cd\\", '
    '\\"tokens\\": \\"5f2dc51345e638f0dd93e06a15b82a2d78d8d96f253378bc0af5fe5ecfdd5c0b\\"}",'
    '"codec":"none","dtype":"float32","format":"pictool.kvo","head_dim":"2",'
    '"header":"8b113fe8da487fc318af10077eb202f7fab81f03c8de61612dc4c322a8bdaea5",'
    '"key":"5fd42782a2e664916a616a7d3a4f3be01cd4d71dfb05654d948632c878debba5",'
    '"kv_heads":"2","layers":"1",'
    '"model":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","sinks":"0",'
    '"tokenizer":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","tokens":"3","version":"1"},'
    '"layers.000.key":{"data_offsets":[12,60],"dtype":"F32","shape":[2,3,2]},'
    '"layers.000.value":{"data_offsets":[60,108],"dtype":"F32","shape":[2,3,2]},'
    '"text":{"data_offsets":[108,126],"dtype":"U8","shape":[18]},'
    '"tokens":{"data_offsets":[0,12],"dtype":"I32","shape":[3]}}'
)
GOLDEN_SHA256 = "d69c8fe9a555f54cbd574a06b75f1975f6bbb417b9f84eb134c63a7f317802c8"


def test_golden_header(path: Path) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert data[8 : 8 + length].decode().rstrip(" ") == GOLDEN_HEADER
    assert length % 8 == 0


def test_golden_bytes(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN_SHA256


def write_by_description(path: Path, dtype: str, fixups: bool, more: dict[str, str], identity: dict[str, Any]) -> str:
    """Write an object as the description in `format.py` says, with nothing of the package; returns its key."""
    n, (layers, heads, size), width = 3, (2, 1, 4), 4 if dtype == "float32" else 2
    tokens, text = struct.pack("<3i", 7, 0, 4000), "¶ one".encode()
    part = bytes(range(n * heads * size * width))
    geometry = {"head_dim": size, "kv_heads": heads, "layers": layers}
    names = {"architecture": "X", "model": "a" * 64, "tokenizer": "b" * 64, "dtype": dtype}
    named = names | {"geometry": geometry} | identity | ({} if dtype == "float32" else {"frequencies": "float32"})
    key = hashlib.sha256(json.dumps(named, sort_keys=True).encode() + tokens).hexdigest()
    if "salted" in more:
        key = hashlib.sha256(f"{key} {more['salted']}".encode()).hexdigest()
    tensors = [("tokens", "I32", [n], tokens)]
    for layer in range(layers):
        shape = ({"float32": "F32", "bfloat16": "BF16"}[dtype], [heads, n, size], part)
        tensors += [(f"layers.{layer:03d}.key", *shape), (f"layers.{layer:03d}.value", *shape)]
    tensors += [("fixups", "F16", [n], bytes(2 * n))] if fixups else []
    tensors.append(("text", "U8", [len(text)], text))
    hashes = {"layers": [blake3(part + part).hexdigest()] * layers}
    checksums: dict[str, Any] = hashes | {
        name: blake3(data).hexdigest() for name, _, _, data in tensors if "." not in name
    }
    metadata = names | more | {name: str(value) for name, value in geometry.items()} | {
        "format": "pictool.kvo", "version": "1", "key": key, "tokens": str(n), "sinks": "0", "codec": "none",
        "checksums": json.dumps(checksums, sort_keys=True), "header": "",
    }  # fmt: skip
    metadata |= {
        name: str(value) for name, value in identity.items() if name in metadata or name in ("dummy", "parent")
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, kind, sizes, data in tensors:
        header[name] = {"data_offsets": [end, end + len(data)], "dtype": kind, "shape": sizes}
        end += len(data)

    def written() -> bytes:
        raw = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        return raw + b" " * (-len(raw) % 8)

    metadata["header"] = blake3(written()).hexdigest()
    path.write_bytes(struct.pack("<Q", len(written())) + written() + b"".join(data for _, _, _, data in tensors))
    return key


@pytest.mark.parametrize(
    ("dtype", "fixups", "more", "identity"),
    [
        ("float32", False, {}, {"codec": "none", "sinks": 0}),
        ("bfloat16", False, {}, {"codec": "none", "sinks": 4, "dummy": 1}),
        ("float32", True, {"fixups": "self-8x60-3"}, {"codec": "none", "sinks": 0}),
        ("bfloat16", False, {"salted": "c" * 64}, {"codec": "none", "sinks": 0}),
        ("float32", False, {}, {"parent": "", "rotation": ""}),
    ],
    ids=["plain", "sinks", "fixups", "salted", "block"],
)
def test_an_object_is_written_by_the_description_alone(
    tmp_path: Path, dtype: str, fixups: bool, more: dict[str, str], identity: dict[str, Any]
) -> None:
    key = write_by_description(tmp_path / "x.kvo", dtype, fixups, more, identity)
    with ObjectFile(tmp_path / "x.kvo") as file:
        file.verify()
        assert (file.meta.key, file.text(), file.tokens().tolist()) == (key, "¶ one", [7, 0, 4000])


def test_data_follows_the_header_without_gaps(path: Path) -> None:
    numbers = np.arange(24, dtype="<f4").tobytes()
    assert split(path.read_bytes())[1] == np.asarray(TOKENS, dtype="<i4").tobytes() + numbers + TEXT.encode()


def test_the_same_chunk_gives_the_same_bytes(tmp_path: Path, path: Path) -> None:
    assert write(tmp_path / "again.kvo", make_chunk()).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("num_tokens", [3, 1 << 16])
def test_what_is_in_memory_is_read_as_the_file_is(tmp_path: Path, num_tokens: int) -> None:
    chunk = make_chunk(tuple(range(num_tokens)))
    data, encoded = write(tmp_path / "one.kvo", chunk).read_bytes(), encode_object(chunk)
    assert encoded.num_bytes == len(data) and (len(encoded.parts) == 1) == (num_tokens == 3)
    for start, end in ((0, len(data)), (0, 8), (7, len(data) - 9), (len(data) - 5, len(data) + 5), (50, 50)):
        assert encoded.read(start, end) == data[start:end]
    with ObjectFile(tmp_path / "one.kvo") as file:
        assert encoded.header() == file.header() and encoded.meta == file.meta


def test_memoryviews_give_the_same_bytes(tmp_path: Path, path: Path) -> None:
    chunk = make_chunk()
    views = replace(chunk, layers=[(memoryview(bytearray(key)), memoryview(value)) for key, value in chunk.layers])
    assert write(tmp_path / "views.kvo", views).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    target = replace(TARGET, dtype=dtype, geometry=Geometry(layers=3, kv_heads=2, head_dim=4))
    chunk = make_chunk(target=target, after=((1, 2), (3,)))
    assert read(write(tmp_path / "one.kvo", chunk)) == content(chunk)


def test_safetensors_reads_the_same_numbers(path: Path) -> None:
    tensors = safetensors.numpy.load(path.read_bytes())
    assert list(tensors["tokens"]) == list(TOKENS) and tensors["tokens"].dtype == np.int32
    assert bytes(tensors["text"]).decode() == TEXT
    assert np.array_equal(tensors["layers.000.key"], np.arange(12, dtype=np.float32).reshape(2, 3, 2))
    assert np.array_equal(tensors["layers.000.value"], np.arange(12, 24, dtype=np.float32).reshape(2, 3, 2))
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "pictool.kvo"
        assert set(file.keys()) == {"tokens", "layers.000.key", "layers.000.value", "text"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_safetensors_reads_half_precision(tmp_path: Path, dtype: str) -> None:
    numbers = torch.linspace(-3, 3, 24, dtype=getattr(torch, dtype)).view(2, 2, 3, 2)
    key, value = (part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in numbers)
    chunk = replace(make_chunk(target=replace(TARGET, dtype=dtype)), layers=[(key, value)])
    tensors = safetensors.torch.load_file(write(tmp_path / "half.kvo", chunk))
    assert torch.equal(tensors["layers.000.key"], numbers[0])
    assert torch.equal(tensors["layers.000.value"], numbers[1])


def test_layers_are_handed_out_writable_and_fresh(path: Path) -> None:
    with ObjectFile(path) as file:
        key, _ = file.layer(0)
        key[:4] = b"\xff" * 4
        assert bytes(file.layer(0)[0]) == make_chunk().layers[0][0]
        assert file.num_bytes == path.stat().st_size


def test_a_chunk_that_is_not_what_its_meta_says_is_a_bug(tmp_path: Path) -> None:
    chunk = make_chunk()
    wrong = [
        replace(chunk, layers=[]),
        replace(chunk, layers=[*chunk.layers] * 2),
        replace(chunk, tokens=chunk.tokens[1:]),
    ]
    for chunk in wrong:
        with pytest.raises(AssertionError):
            write(tmp_path / "wrong.kvo", chunk)


# Damage


@pytest.mark.parametrize("bits", [0x01, 0x20, 0xFF])
def test_every_flipped_byte_is_refused(path: Path, bits: int) -> None:
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset, byte in enumerate(whole):
            os.pwrite(file.fileno(), bytes([byte ^ bits]), offset)
            with pytest.raises(ObjectError):
                read(path)
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert path.read_bytes() == whole


PARTS: dict[str, Callable[[ObjectFile], object]] = {
    "tokens": lambda file: file.tokens(),
    "layers.000.key": lambda file: file.layer(0),
    "layers.000.value": lambda file: file.layer(0),
    "text": lambda file: file.text(),
}


@pytest.mark.parametrize("name", PARTS)
def test_damage_is_found_before_a_number_is_used(path: Path, name: str) -> None:
    whole = path.read_bytes()
    header, body = split(whole)
    offset = len(whole) - len(body) + header[name]["data_offsets"][1] - 1
    path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
    with ObjectFile(path) as file, pytest.raises(ObjectError, match=f"^{path}: "):
        PARTS[name](file)


def test_every_truncation_is_refused(path: Path) -> None:
    for size in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(ObjectError):
            ObjectFile(path)


def test_a_file_that_shrinks_while_open_is_refused(path: Path) -> None:
    with ObjectFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ObjectError, match=f"^{path}: "):
            file.text()


@pytest.mark.parametrize("more", [b"\0", b" " * 8, b"x" * 4096])
def test_bytes_behind_the_end_are_refused(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(ObjectError):
        ObjectFile(path)


def framed(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def with_x(x: bytes) -> bytes:
    """A header that looks right until `x` is read."""
    return framed(b'{"__metadata__":{"format":"pictool.kvo","version":"1"},"x":' + x + b"}")


NOT_OBJECTS = {
    "empty": b"",
    "short": b"1234567",
    "only a length": bytes(8),
    "text": b"This page is about Gadoos. It holds a festival.\n" * 40,
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "empty JSON": framed(b"{}"),
    "a list": framed(b"[]"),
    "a number": framed(b"7"),
    "metadata a list": framed(b'{"__metadata__":[]}'),
    "metadata a text": framed(b'{"__metadata__":"format"}'),
    "metadata null": framed(b'{"__metadata__":null}'),
    "deep": framed(b'{"__metadata__":' + b"[" * 200_000),
    "deep and whole": with_x(b"[" * 900 + b"]" * 900),
    "a lone surrogate": with_x(b'"\\ud800"'),
    "a surrogate as format": framed(b'{"__metadata__":{"format":"\\ud800"}}'),
    "UTF-16": framed('{"__metadata__":{"format":"pictool.kvo","version":"1"}}'.encode("utf-16")),
    "not UTF-8": framed(b'{"\xff\xfe":1}'),
    "a number of many digits": with_x(b"9" * 9999),
}


@pytest.mark.parametrize("data", NOT_OBJECTS.values(), ids=NOT_OBJECTS.keys())
def test_what_is_not_an_object_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.kvo"
    path.write_bytes(data)
    with pytest.raises(ObjectError, match=r"other\.kvo: ") as caught:
        ObjectFile(path)
    assert "\n" not in str(caught.value)


def test_garbage_is_refused(tmp_path: Path) -> None:
    path, draw = tmp_path / "garbage.kvo", np.random.default_rng(0)
    for size in (8, 9, 64, 1000, 5000):
        for _ in range(20):
            path.write_bytes(draw.bytes(size))
            with pytest.raises(ObjectError):
                ObjectFile(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 100_000_001, 5000])
def test_a_huge_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "huge.kvo"
    path.write_bytes(struct.pack("<Q", length) + b"{" * 4096)
    tracemalloc.start()
    try:
        with pytest.raises(ObjectError, match=f"^{path}: "):
            ObjectFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_another_writer_s_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(ObjectError, match=f"^{path}: "):
        ObjectFile(path)
    safetensors.numpy.save_file({"x": np.zeros(3)}, path, {"format": "pt"})
    with pytest.raises(ObjectError, match="'pt'"):
        ObjectFile(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kvo")
    for name in (".", "pipe.kvo", "missing.kvo"):
        with pytest.raises(ObjectError):
            ObjectFile(tmp_path / name)
    with pytest.raises(ObjectError):
        ObjectFile("/dev/null")


# Headers with a checksum that holds, of a writer that is not ours


def forge(path: Path, *keys: str, value: Any) -> Path:
    """Set one value of the header (none, to delete it), and seal it again."""
    header, body = split(path.read_bytes())
    inner = functools.reduce(lambda node, key: node[key], keys[:-1], header)
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_bytes(sealed(header, body))
    return path


def test_another_format_is_refused(path: Path) -> None:
    with pytest.raises(ObjectError, match=r"'pictool\.trace'"):
        ObjectFile(forge(path, "__metadata__", "format", value="pictool.trace"))


def test_another_version_is_refused_naming_both(path: Path) -> None:
    with pytest.raises(ForeignObjectError, match=f"^{path}: "):
        ObjectFile(forge(path, "__metadata__", "version", value="2"))


def test_another_codec_is_refused_by_name(path: Path) -> None:
    with pytest.raises(ForeignObjectError, match="'int3'"):
        ObjectFile(forge(path, "__metadata__", "codec", value="int3"))


def test_another_dtype_is_refused_by_name(path: Path) -> None:
    with pytest.raises(ForeignObjectError, match="'float8'"):
        ObjectFile(forge(path, "__metadata__", "dtype", value="float8"))


FIELDS = [name for name in json.loads(GOLDEN_HEADER)["__metadata__"] if name != "header"]
VALID = (("sinks", "2"), ("kv_heads", "2"), ("head_dim", "2"))
NUMBER_FIELDS = ("layers", "kv_heads", "head_dim", "tokens", "sinks")
ODD_NUMBERS = ("", "x", "-1", "1.0", " 1", "+1", "01", "1_0", "٣", "2", "4294967296", "9" * 4000, "9" * 5000)
ODD_CHECKSUMS = (
    "", "7", "[]", "{}", "null", "[" * 9999, '{"layers": [], "text": "", "tokens": ""}',
    '{"layers": {"0": ""}, "text": "", "tokens": ""}', '{"layers": "0", "text": "", "tokens": ""}',
    '{"layers": [7], "text": null, "tokens": []}', '{"layers":[""],"text":"","tokens":""}',
)  # fmt: skip
TEXT_ENTRY = {"data_offsets": [108, 126], "dtype": "U8", "shape": [18]}


ODD_SHAPES: tuple[Any, ...] = ([], [18.0], ["18"], [True], [-18], [1e999], [18, 1], 18, None)
ODD_OFFSETS: tuple[Any, ...] = ([], [108], [108, 126.0], ["108", "126"], [108, 10**30])


def odd_headers() -> list[tuple[tuple[str, ...], Any]]:
    """(where in the header, what to put there)"""
    values: dict[str, list[Any]] = {name: [None, 7, [], {}, math.inf] for name in FIELDS}
    for name in NUMBER_FIELDS:
        values[name] += [odd for odd in ODD_NUMBERS if (name, odd) not in VALID]
    values["checksums"] += ODD_CHECKSUMS
    text: list[Any] = [None, 7, [], {}, "", *({**TEXT_ENTRY, "shape": odd} for odd in ODD_SHAPES)]
    text += [{**TEXT_ENTRY, "data_offsets": odd} for odd in ODD_OFFSETS]
    more: list[tuple[tuple[str, ...], Any]] = [(("more",), TEXT_ENTRY), (("__metadata__", "more"), "1")]
    more += [(("text",), odd) for odd in text]
    return [(("__metadata__", name), odd) for name, odds in values.items() for odd in odds] + more


@pytest.mark.parametrize(("keys", "value"), odd_headers(), ids=lambda value: str(value)[:40])
def test_odd_headers_are_refused(path: Path, keys: tuple[str, ...], value: Any) -> None:
    with pytest.raises(ObjectError):
        read(forge(path, *keys, value=value))


def test_many_layers_that_are_not_there_allocate_nothing(path: Path) -> None:
    forge(path, "__metadata__", "layers", value="2000000000")
    tracemalloc.start()
    try:
        with pytest.raises(ObjectError):
            ObjectFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_negative_length_of_text_is_refused(path: Path) -> None:
    header, body = split(path.read_bytes())
    header["text"] = {"data_offsets": [108, 98], "dtype": "U8", "shape": [-10]}
    path.write_bytes(sealed(header, body[:98]))
    with pytest.raises(ObjectError):
        ObjectFile(path)


class Latin1(str):
    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return super().encode("latin-1")


def test_a_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.kvo", make_chunk(text=Latin1("naïve")))
    with ObjectFile(path) as file, pytest.raises(ObjectError, match=f"^{path}: "):
        file.text()


# What an object was made for


REQUIRED: dict[str, tuple[Any, str, str]] = {
    "model": ("c" * 64, "aaaaaaaaaaaa", "cccccccccccc"),
    "tokenizer": ("c" * 64, "bbbbbbbbbbbb", "cccccccccccc"),
    "dtype": ("bfloat16", "float32", "bfloat16"),
    "architecture": ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"),
    "geometry": (Geometry(1, 2, 4), "head_dim=2", "head_dim=4"),
}


@pytest.mark.parametrize("field", REQUIRED)
def test_an_object_for_something_else_is_refused_naming_both(path: Path, field: str) -> None:
    value, theirs, ours = REQUIRED[field]
    with ObjectFile(path) as file:
        file.meta.require(TARGET, "one.kvo")
        with pytest.raises(ForeignObjectError, match=rf"^one\.kvo: .* {field} .*{theirs}.* {field} .*{ours}"):
            file.meta.require(replace(TARGET, **{field: value}), "one.kvo")


# Properties


CONTEXTS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple), max_size=3).map(tuple)


@st.composite
def chunks(draw: st.DrawFn) -> CompiledChunk:
    counts = draw(st.tuples(*[st.integers(1, 3)] * 3))
    name, dtype = st.text(max_size=20).filter(str.isprintable), draw(st.sampled_from(list(DTYPES)))
    target = Target(draw(name), draw(name), draw(name), dtype, Geometry(*counts))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
    return make_chunk(tuple(tokens), draw(st.text(max_size=200)), target, draw(CONTEXTS))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects") / "any.kvo"


@given(chunk=chunks())
@settings(max_examples=80, deadline=None, database=None)
def test_any_chunk_round_trips(scratch: Path, chunk: CompiledChunk) -> None:
    assert read(write(scratch, chunk)) == content(chunk)
    tensors = safetensors.torch.load_file(scratch)
    assert bytes(tensors["text"].numpy()).decode() == chunk.text


@given(
    cuts=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=4)
)
@settings(max_examples=120, deadline=None, database=None)
def test_any_mutation_is_refused(scratch: Path, cuts: list[tuple[int, int, bytes]]) -> None:
    whole = data = write(scratch, make_chunk()).read_bytes()
    for start, length, put in cuts:
        start %= len(data) + 1
        data = data[:start] + put + data[start + length :]
    scratch.write_bytes(data)
    if data == whole:
        assert read(scratch) == content(make_chunk())
    else:
        with pytest.raises(ObjectError):
            read(scratch)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(ODD_NUMBERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(place=st.integers(0, 10**6), value=JSON)
@settings(max_examples=120, deadline=None, database=None)
def test_any_sealed_header_is_read_or_refused(scratch: Path, place: int, value: Any) -> None:
    header, body = split(write(scratch, make_chunk()).read_bytes())
    nodes = [(header["__metadata__"], name) for name in FIELDS if name != "header"]
    entries = [header[name] for name in header if name != "__metadata__"]
    nodes += [(header, name) for name in header if name != "__metadata__"]
    nodes += [(entry, field) for entry in entries for field in entry]
    node, name = nodes[place % len(nodes)]
    node[name] = value
    scratch.write_bytes(sealed(header, body))
    with contextlib.suppress(ObjectError):
        assert read(scratch)[1:] == content(make_chunk())[1:]


# Tables of fixups, which objects of version 0.3 may have


@pytest.fixture
def table_path(tmp_path: Path) -> Path:
    path = tmp_path / "table.kvo"
    write_by_description(path, "float32", True, {"fixups": "self-8x60-3"}, {"codec": "none", "sinks": 0})
    return path


def test_any_safetensors_reader_sees_or_skips_a_table(table_path: Path) -> None:
    tensors = safetensors.numpy.load(table_path.read_bytes())
    assert tensors["fixups"].tolist() == [0.0] * 3
    assert set(tensors) > {"tokens", "layers.000.key", "layers.001.value", "text"}


def test_every_flipped_byte_beside_a_table_is_refused(table_path: Path) -> None:
    whole = table_path.read_bytes()
    with table_path.open("r+b", buffering=0) as out:
        for offset, byte in enumerate(whole):
            os.pwrite(out.fileno(), bytes([byte ^ 1]), offset)
            with pytest.raises(ObjectError), ObjectFile(table_path) as file:
                file.verify()
            os.pwrite(out.fileno(), bytes([byte]), offset)


def test_a_forged_header_without_its_table_is_refused(table_path: Path) -> None:
    header, body = split(table_path.read_bytes())
    del header["fixups"]
    table_path.write_bytes(sealed(header, body))
    with pytest.raises(ObjectError, match=f"^{table_path}: "):
        ObjectFile(table_path)
