"""Objects that an attacker wrote, with checksums that hold: each is one damaged object; all others work as before."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from chunks import make_chunk

from pictool.core import Geometry, Target
from pictool.errors import InputError, ObjectError, PicError, StoreError
from pictool.store import eviction
from pictool.store.codecs import packing
from pictool.store.codecs.base import CodingError
from pictool.store.database import DATABASE, JOURNAL
from pictool.store.directory import MARK
from pictool.store.entries import object_path
from pictool.store.objects.bundles import export_archive
from pictool.store.objects.format import (
    CompiledChunk,
    ObjectFile,
    ObjectMeta,
    metadata_of,
    tensor_entries,
    write_object,
)
from pictool.store.store import Store
from pictool.store.upkeep import gc, stats, verify

KEY = make_chunk(0).meta.key
Change = Callable[[dict[str, Any]], object]


def sealed(text: str) -> bytes:
    """The header with its own checksum put into the empty field `header`, whatever the rest of the text is."""
    raw = text.encode()
    digest = blake3(raw + b" " * (-len(raw) % 8)).hexdigest().encode()
    raw = raw.replace(b'"header":""', b'"header":"' + digest + b'"')
    return raw + b" " * (-len(raw) % 8)


def dumped(header: dict[str, Any]) -> str:
    return json.dumps(header, sort_keys=True, separators=(",", ":"))


def healthy() -> tuple[dict[str, Any], bytes]:
    """The header (its seal empty) and the data of an object of the key KEY."""
    with BytesIO() as file:
        write_object(file, make_chunk(0))
        data = file.getvalue()
    end = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:end])
    header["__metadata__"]["header"] = ""
    return header, bytes(data[end:])


def metadata(name: str, value: Any) -> Change:
    return lambda header: header["__metadata__"].__setitem__(name, value)


def tensor(name: str, field: str, value: Any) -> Change:
    return lambda header: header[name].__setitem__(field, value)


def checksums(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(header: dict[str, Any]) -> None:
        inner = json.loads(header["__metadata__"]["checksums"])
        change(inner)
        header["__metadata__"]["checksums"] = json.dumps(inner, sort_keys=True)

    return apply


CHANGES: dict[str, Change] = {
    **{
        f"surrogate {name}": metadata(name, "\ud800") for name in ("architecture", "model", "tokenizer", "key", "codec")
    },
    **{f"surrogate {name}": metadata(name, "\ud800") for name in ("dtype", "version", "format", "checksums", "more")},
    **{f"control {name}": metadata(name, "\x1b[2J\n") for name in ("architecture", "model", "tokenizer", "version")},
    **{f"number {name}": metadata(name, 7) for name in ("architecture", "model", "layers", "tokens", "parent")},
    **{f"huge {name}": metadata(name, "9" * 5000) for name in ("layers", "tokens", "sinks", "head_dim")},
    **{f"infinite {name}": metadata(name, 1e400) for name in ("layers", "key", "version", "format", "codec")},
    "surrogate fixups": metadata("fixups", "\ud800"),
    "surrogate parent": metadata("parent", "\ud800"),
    "surrogate of a tensor": lambda header: header.__setitem__("\ud800", header["text"]),
    "parent elsewhere": metadata("parent", "../../x"),
    "key elsewhere": metadata("key", "../" * 20 + "tmp/x"),
    "long architecture": metadata("architecture", "x" * 100_000),
    "long version": metadata("version", "x" * 100_000),
    "dummy without sinks": metadata("dummy", "1"),
    "metadata null": lambda header: header.__setitem__("__metadata__", None),
    "checksums a number": metadata("checksums", "7"),
    "checksums deep": metadata("checksums", "[" * 100_000),
    "checksums NaN": metadata("checksums", "NaN"),
    "surrogate checksum": checksums(lambda inner: inner.__setitem__("text", "\ud800")),
    "checksum null": checksums(lambda inner: inner.__setitem__("text", None)),
    "surrogate layer": checksums(lambda inner: inner["layers"].__setitem__(0, "\ud800")),
    "offsets 1e400": tensor("text", "data_offsets", [0, 1e400]),
    "offsets NaN": tensor("text", "data_offsets", [float("nan"), 1]),
    "offsets huge": tensor("text", "data_offsets", [0, 10**300]),
    "shape 1e400": tensor("text", "shape", [1e400]),
    "shape huge": tensor("text", "shape", [10**300]),
    "shape true": tensor("text", "shape", [True]),
    "shape text": tensor("text", "shape", "x"),
    "tensor a list": lambda header: header.__setitem__("text", []),
    "dtype surrogate": tensor("text", "dtype", "\ud800"),
}
RAW: dict[str, Callable[[str], str]] = {
    "NaN": lambda text: text.replace('"text":{', '"text":NaN,"text":{'),
    "duplicate key": lambda text: text.replace('"sinks":"0"', '"sinks":"0","sinks":"0"'),
    "escaped": lambda text: text.replace('"codec":"none"', '"codec":"\\u006eone"'),
    "deep": lambda text: text.replace('"codec":"none"', '"codec":' + "[" * 100_000),
    "many digits": lambda text: text.replace('"sinks":"0"', '"sinks":' + "9" * 100_000),
}


def forgeries() -> Iterator[tuple[str, bytes]]:
    for name, change in CHANGES.items():
        header, data = healthy()
        change(header)
        raw = sealed(dumped(header))
        yield name, struct.pack("<Q", len(raw)) + raw + data
    for name, edit in RAW.items():
        header, data = healthy()
        raw = sealed(edit(dumped(header)))
        yield name, struct.pack("<Q", len(raw)) + raw + data


FORGERIES = dict(forgeries())


@pytest.fixture
def path(store: Store) -> Path:
    """The place of the object KEY, in a store with two whole objects."""
    store.put(make_chunk(1)), store.put(make_chunk(2))
    path = object_path(store.root, KEY)
    path.parent.mkdir(parents=True)
    return path


def require_one_damaged(store: Store, problem: str = f"{KEY}.kvo: ") -> None:
    """Every command goes on: the damaged object is named, the others are there."""
    listed = {stored.key: stored for stored in store.objects(chains=True)}
    assert len(listed) == 3 and [key for key in listed if listed[key].problem] == [KEY]
    shown = listed[KEY].problem or ""
    assert problem in shown and shown.isprintable() and len(shown) < 1000
    assert not store.has(KEY) and stats(store).damaged == 1
    whole = [key for key in listed if key != KEY]
    export_archive(store, whole, store.root / "out")
    with pytest.raises(PicError):
        export_archive(store, [KEY], store.root / "bad")
    gc(store)
    assert list(verify(store).problems) == [KEY]
    assert sorted(store.keys()) == sorted(listed)


def test_the_forger_can_write_a_healthy_object(store: Store, path: Path) -> None:
    header, data = healthy()
    raw = sealed(dumped(header))
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    with ObjectFile(path) as file:
        file.verify()


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_header_is_one_damaged_object(store: Store, path: Path, name: str) -> None:
    path.write_bytes(FORGERIES[name])
    require_one_damaged(store)
    done = verify(store, repair=True)
    assert done.repaired == (KEY,) or "but this pic" in done.problems[KEY]  # another version's stays
    assert verify(store).objects == 3 - len(done.repaired)


def test_a_key_with_a_path_moves_nothing(store: Store, path: Path, tmp_path: Path) -> None:
    """An object under the name of another is removed, whatever its own name is."""
    before = sorted(tmp_path.rglob("*"))
    path.write_bytes(FORGERIES["key elsewhere"])
    assert verify(store, repair=True).repaired == (KEY,)
    assert sorted(tmp_path.rglob("*")) == before


# What is no regular file. Nothing may wait: a test that does is ended by the alarm.


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.parent / "pipe")
    path.symlink_to("pipe")


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (make_pipe, "it is a named pipe, not a regular file"),
    "device": (make_device, "it is a device, not a regular file"),
    "socket": (make_socket, "it is a socket, not a regular file"),
    "directory": (make_directory, "it is a directory, not a regular file"),
    "link to a pipe": (make_link_to_pipe, "it is a named pipe, not a regular file"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_one_damaged_object(
    store: Store, path: Path, kind: str, alarm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    make, what = KINDS[kind]
    make(path)
    require_one_damaged(store, what)
    assert verify(store, repair=True).repaired == (KEY,) and not os.path.lexists(path)
    assert verify(store).problems == {}


@pytest.mark.parametrize("budget", [None, 1])
def test_a_directory_with_something_in_it_stays_and_stops_nothing(store: Store, path: Path, budget: int | None) -> None:
    path.mkdir()
    (path / "precious").touch()
    damaged = store.path(make_chunk(1).meta.key)
    damaged.write_bytes(b"x" * 100)
    done = verify(store, repair=True)
    assert done.repaired == (damaged.stem,) and set(done.problems) == {KEY, damaged.stem}
    assert "is a directory in the place of an object" in done.problems[KEY]
    with pytest.raises(StoreError, match=f"^{path}: "):
        store.put(make_chunk(0))
    gc(store, budget)
    assert (path / "precious").exists() and len(store.keys()) == (2 if budget is None else 1)


def test_a_link_in_the_place_of_an_object_is_replaced_not_followed(store: Store, tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", store.path(make_chunk(1).meta.key)
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    store.put(make_chunk(1))
    assert not victim.exists() and not path.is_symlink() and verify(store).problems == {}


def test_litter_that_is_no_file_is_removed(store: Store, tmp_path: Path, alarm: None) -> None:
    store.put(make_chunk(1))
    (tmp_path / "precious").write_text("x")
    os.mkfifo(store.root / "tmp" / ".pipe.0123456789abcdef.tmp")
    (store.root / "tmp" / ".link.0123456789abcdef.tmp").symlink_to(tmp_path / "precious")
    assert gc(store).litter.count == 2
    assert os.listdir(store.root / "tmp") == [] and (tmp_path / "precious").exists()


@pytest.mark.parametrize("name", ["lock", "tmp"])
def test_a_link_as_lock_or_temp_is_refused_in_one_line(store: Store, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    store.ensure_store()
    shutil.rmtree(store.root / "tmp")
    (store.root / name).symlink_to(elsewhere if name == "tmp" else elsewhere / "precious")
    for run in (lambda: store.put(make_chunk(1)), lambda: gc(store)):
        with pytest.raises(StoreError, match=rf"\({name} "):
            run()
    assert (elsewhere / "precious").read_text() == "x" and os.listdir(elsewhere) == ["precious"]


@pytest.mark.parametrize("make", [make_pipe, make_directory, make_socket], ids=["pipe", "directory", "socket"])
def test_a_lock_that_is_no_file_is_refused_in_one_line(
    store: Store, make: Callable[[Path], None], alarm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.ensure_store()
    monkeypatch.chdir(store.root)
    make(store.root / "lock")
    with pytest.raises(StoreError, match=r"\(lock "):
        store.put(make_chunk(1))


# Bombs: small files that state a large size, with checksums that hold


def frame(data: bytes, size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=19, write_content_size=size).compress(data)


def coded_object(path: Path, codec: str, shape: tuple[int, int, int], part: bytes, num_tokens: int = 1) -> Path:
    """An object of one layer (layers, kv_heads, head_dim) whose coded bytes are `part` for every layer."""
    target = Target("llama", "a" * 64, "b" * 64, "float32", Geometry(*shape))
    tokens = np.zeros(num_tokens, dtype="<i4").tobytes()
    meta = ObjectMeta(target.key([0] * num_tokens, codec), target, num_tokens, codec)
    hashes = {name: blake3(data).hexdigest() for name, data in (("tokens", tokens), ("text", b"text"))}
    header: dict[str, Any] = tensor_entries(meta, 4, [len(part)] * shape[0])
    fields = metadata_of(meta, hashes | {"layers": [blake3(part).hexdigest()] * shape[0]})
    raw = sealed(dumped({"__metadata__": fields | {"header": ""}, **header}))
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + tokens + part * shape[0] + b"text")
    return path


def packed(*frames: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(data)) + data for data in frames)


def peak_of(run: Callable[[], object]) -> int:
    """Bytes at most in use while it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(ObjectError):
            run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read_all(path: Path) -> None:
    with ObjectFile(path) as file:
        file.verify()


@pytest.mark.parametrize("codec", ["zstd", "int8", "fp8", "int4"])
def test_a_small_object_that_decodes_to_gigabytes_is_refused_unopened(tmp_path: Path, codec: str) -> None:
    """Some KB for 64 MB of zeros in each of 64 layers: what zstd makes of them, in frames of the right sizes."""
    plane = frame(bytes(16 << 20))
    path = coded_object(tmp_path / "bomb.kvo", codec, (64, 64, 64), packed(*[plane] * 4), num_tokens=2048)
    assert path.stat().st_size < 200_000
    assert peak_of(lambda: read_all(path)) < 1 << 20


@pytest.mark.parametrize(
    "part",
    [
        lambda: packed(*[frame(bytes(1 << 28))] * 4),
        lambda: packed(*[frame(bytes(1 << 20), size=False)] * 4),
        lambda: packed(*[frame(bytes(1024)) + frame(bytes(1 << 28))] * 4),
        lambda: packed(*[frame(bytes(1024))] * 5),
        lambda: packed(*[frame(bytes(1023))] * 4),
        bytes,
    ],
    ids=["larger", "unknown", "two frames", "a part too many", "smaller", "empty"],
)
def test_a_frame_of_another_size_is_refused_before_it_is_decoded(tmp_path: Path, part: Callable[[], bytes]) -> None:
    path = coded_object(tmp_path / "bomb.kvo", "zstd", (1, 8, 64), part())
    assert peak_of(lambda: read_all(path)) < 1 << 20


def test_the_decompressor_has_the_size_as_its_limit() -> None:
    data = packed(frame(bytes(100)))
    assert len(packing.unpack(memoryview(data), [100])[0]) == 100
    with pytest.raises(CodingError):
        packing.unpack(memoryview(packed(frame(bytes(100), size=False))), [100])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", (1 << 24) + 1), ("layers", 1025), ("kv_heads", 1 << 17), ("head_dim", 1 << 17), ("sinks", 1 << 25),
        ("kv_heads", 1 << 31), ("tokens", 0), ("layers", 0),
    ],
)  # fmt: skip
def test_sizes_of_no_model_are_refused(tmp_path: Path, field: str, value: int) -> None:
    path = tmp_path / "odd.kvo"
    header, data = healthy()
    header["__metadata__"][field] = str(value)
    raw = sealed(dumped(header))
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    assert peak_of(lambda: ObjectFile(path)) < 1 << 20


def test_a_text_of_a_terabyte_of_holes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "holes.kvo"
    header, data = healthy()
    start = header["text"]["data_offsets"][0]
    header["text"] |= {"data_offsets": [start, start + (1 << 40)], "shape": [1 << 40]}
    raw = sealed(dumped(header))
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    os.truncate(path, 8 + len(raw) + start + (1 << 40))
    assert peak_of(lambda: ObjectFile(path)) < 1 << 20


def test_a_plain_layer_is_verified_a_piece_at_a_time(tmp_path: Path) -> None:
    """32 MB of a layer, with holes: a store may have a file of any size, and its checksum may hold."""
    target = Target("llama", "a" * 64, "b" * 64, "float32", Geometry(1, 32, 128))
    tokens, layer = np.zeros(1024, dtype="<i4"), bytes(32 * 128 * 1024 * 4)
    path = tmp_path / "plain.kvo"
    with path.open("wb") as file:
        meta = ObjectMeta(target.key(tokens, "none"), target, 1024, "none")
        write_object(file, CompiledChunk(meta, "text", tokens, [(layer, layer)]))
    tracemalloc.start()
    try:
        read_all(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_what_a_reader_would_take_for_a_bomb_is_not_written(tmp_path: Path) -> None:
    target = Target("llama", "a" * 64, "b" * 64, "float32", Geometry(1, 16, 128))
    tokens, part = np.zeros(512, dtype="<i4"), bytes(16 * 128 * 512 * 4)
    meta = ObjectMeta(target.key(tokens, "zstd"), target, 512, "zstd")
    with (tmp_path / "zeros.kvo").open("wb") as file, pytest.raises(InputError, match=" zstd "):
        write_object(file, CompiledChunk(meta, "text", tokens, [(part, part)]))
    with (tmp_path / "long.kvo").open("wb") as file, pytest.raises(InputError, match=f" {(1 << 26) + 1:,} "):
        write_object(file, replace(make_chunk(1), text="x" * ((1 << 26) + 1)))


def test_a_token_below_0_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.kvo"
    with path.open("wb") as file:
        write_object(file, replace(make_chunk(1), tokens=np.full(5, -1, dtype="<i4")))
    with pytest.raises(ObjectError, match=f"^{path}: "):
        read_all(path)


# Who may read and write


def modes(root: Path) -> set[tuple[str, int]]:
    paths = [root, *root.rglob("*")]
    return {("d" if path.is_dir() else "f", path.stat().st_mode & 0o7777) for path in paths}


def fill(store: Store) -> None:
    """Everything that a store has: objects, temp directory, lock, pins, index, counts, and a store within it."""
    path = store.put(make_chunk(1))
    store.within("eval", "some").put(make_chunk(2))
    store.open(path.stem).close()
    store.counters.flush()
    list(store.objects())
    eviction.pin(store.root, path.stem)
    names = {entry.name for entry in store.root.iterdir()}
    assert names == {"objects", "tmp", "lock", "pins", DATABASE, JOURNAL, "eval", MARK}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_store_is_its_owner_s_alone(store: Store, umask: int) -> None:
    before = os.umask(umask)
    try:
        fill(store)
    finally:
        os.umask(before)
    assert modes(store.root) == {("d", 0o700), ("f", 0o600)}


@pytest.mark.parametrize(("mode", "of_files"), [(0o770, 0o660), (0o2770, 0o660), (0o755, 0o644), (0o750, 0o640)])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_shared_store_stays_as_its_owner_made_it(store: Store, mode: int, of_files: int, umask: int) -> None:
    store.root.mkdir()
    store.root.chmod(mode)
    before = os.umask(umask)
    try:
        fill(store)
    finally:
        os.umask(before)
    assert modes(store.root) == {("d", mode), ("f", of_files)}


def test_a_link_as_a_side_file_is_not_written_through(store: Store, tmp_path: Path) -> None:
    path = store.put(make_chunk(1))
    (store.root / DATABASE).symlink_to(tmp_path / "victim")
    (store.root / "pins").mkdir()
    (store.root / "pins" / path.stem).symlink_to(tmp_path / "victim")
    store.open(path.stem).close()
    store.counters.flush()
    assert len(list(store.objects())) == 1
    with pytest.raises(StoreError, match=path.stem):
        eviction.pin(store.root, path.stem)
    assert not (tmp_path / "victim").exists()


def test_an_empty_directory_in_the_place_of_an_object_is_replaced(store: Store, path: Path) -> None:
    path.mkdir()
    store.put(make_chunk(0))
    assert path.is_file() and verify(store).problems == {}


def test_a_link_to_a_directory_in_the_place_of_an_object_is_replaced(store: Store, path: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    path.symlink_to(tmp_path / "precious")
    store.put(make_chunk(0))
    assert path.is_file() and not path.is_symlink() and (tmp_path / "precious").is_dir()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_damage(store: Store, dtype: str, number: float) -> None:
    honest = make_chunk(0)
    target = replace(honest.meta.target, dtype=dtype)
    meta = replace(honest.meta, target=target, key=target.key(honest.tokens, "none"))
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    whole = np.linspace(-3e4, 3e4, 4 * len(honest.tokens)).astype(kind)
    part = whole.copy()
    part[7] = number
    sound, damaged = (whole.tobytes(), whole.tobytes()), (part.tobytes(), whole.tobytes())
    store.put(CompiledChunk(meta, "x", honest.tokens, [sound, sound]))
    assert verify(store).problems == {}
    store.put(CompiledChunk(meta, "x", honest.tokens, [sound, damaged]))
    assert "layer 1 contains numbers that are not finite" in verify(store).problems[meta.key]
