"""Object lists: read as written, or refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors import safe_open

from pictool.core import Geometry, Target
from pictool.errors import ForeignObjectError, ObjectError, StoreError
from pictool.store import bundles as objectlist
from pictool.store.bundles import is_object_list, read_object_list, write_object_list
from pictool.store.format import CompiledChunk, ObjectMeta, write_object

TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(layers=1, kv_heads=1, head_dim=1))
NAMES = ["book.0000.kvo", "book.0001.kvo", 'a b "c" 東京.kvo']


def write_member(path: Path, token: int) -> str:
    tokens = np.asarray([token], dtype=np.int32)
    meta = ObjectMeta(TARGET.key(tokens, 0, "none"), TARGET, 1, 0, "none")
    with path.open("wb") as file:
        write_object(file, CompiledChunk(meta, str(token), tokens, [(bytes(4), bytes(4))]))
    return meta.key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A list with its members beside it."""
    for token, name in enumerate(NAMES):
        write_member(tmp_path / name, token)
    write_object_list(tmp_path / "book.kvo", NAMES)
    return tmp_path / "book.kvo"


def forge(path: Path, objects: object, version: str = "1") -> None:
    """A list with a checksum that holds, of a writer that is not ours."""
    text = json.dumps(objects)
    checksum = blake3(text.encode()).hexdigest()
    metadata = {"checksum": checksum, "format": "pictool.list", "objects": text, "version": version}
    raw = json.dumps({"__metadata__": metadata}).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


def test_round_trip(path: Path) -> None:
    assert is_object_list(path)
    assert read_object_list(path) == [path.parent / name for name in NAMES]


def test_a_member_may_stand_twice_and_a_list_be_empty(path: Path) -> None:
    for members in ([], [NAMES[0], NAMES[0]]):
        write_object_list(path, members)
        assert read_object_list(path) == [path.parent / name for name in members]


def test_a_list_moves_with_its_members(path: Path, tmp_path: Path) -> None:
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    os.chdir(moved)
    assert read_object_list(Path("book.kvo")) == [Path(name) for name in NAMES]


def test_safetensors_reads_it(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        assert list(file.keys()) == []
        assert [name for name, _ in json.loads(file.metadata()["objects"])] == NAMES


def test_the_same_members_give_the_same_bytes(path: Path) -> None:
    before = path.read_bytes()
    write_object_list(path, NAMES)
    assert path.read_bytes() == before


def test_an_object_is_no_list(path: Path) -> None:
    assert not is_object_list(path.parent / NAMES[0])
    with pytest.raises(ObjectError, match="damaged"):
        read_object_list(path.parent / NAMES[0])


def test_every_flipped_byte_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset, byte in enumerate(whole):
            for bits in (0x01, 0x20, 0xFF):
                os.pwrite(file.fileno(), bytes([byte ^ bits]), offset)
                with pytest.raises(ObjectError):
                    read_object_list(path)
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert path.read_bytes() == whole


def test_every_truncation_is_refused(path: Path) -> None:
    for size in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(ObjectError, match="damaged"):
            read_object_list(path)


@pytest.mark.parametrize("more", [b" ", b"\0", b" " * 8, b"{}"])
def test_bytes_behind_the_end_are_refused(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(ObjectError, match="damaged"):
        read_object_list(path)


@pytest.mark.parametrize("objects", ["abc", None, 7, {"a": "b"}, ["a", "b"], ["ab"], [["a"]], [[1, 2]], [[None, None]]])
def test_odd_members_are_refused(path: Path, objects: object) -> None:
    forge(path, objects)
    with pytest.raises(ObjectError, match="damaged"):
        read_object_list(path)


def test_deep_nesting_is_refused(path: Path) -> None:
    path.write_bytes(bytes(8) + b"[" * 200_000)
    with pytest.raises(ObjectError, match="damaged"):
        read_object_list(path)


@pytest.mark.parametrize("name", ["../one.kvo", "/etc/hostname", "sub/one.kvo", "..", ".", "", "./one.kvo", "a\0b"])
def test_a_member_outside_the_directory_is_refused(path: Path, name: str) -> None:
    (path.parent / "sub").mkdir()
    write_member(path.parent.parent / "one.kvo", 1)
    forge(path, [[name, write_member(path.parent / "sub" / "one.kvo", 1)]])
    with pytest.raises(ObjectError, match="not a file beside the list"):
        read_object_list(path)


def test_another_version_is_refused_naming_both(path: Path) -> None:
    forge(path, [], version="2")
    with pytest.raises(ForeignObjectError, match="version 2, but this pic reads version 1"):
        read_object_list(path)


def test_a_member_that_was_written_over_is_refused(path: Path) -> None:
    write_member(path.parent / NAMES[1], 77)
    with pytest.raises(ObjectError, match=r"book\.0001\.kvo: holds the object .* but .*book\.kvo"):
        read_object_list(path)


def test_a_list_in_a_list_is_refused(path: Path) -> None:
    with pytest.raises(ObjectError, match="not an object file"):
        write_object_list(path.with_name("outer.kvo"), ["book.kvo"])
    forge(path, [["book.kvo", "a" * 64]])
    with pytest.raises(ObjectError, match="not an object file"):
        read_object_list(path)


def test_a_missing_member_or_list_is_named(path: Path) -> None:
    (path.parent / NAMES[2]).unlink()
    with pytest.raises(ObjectError, match=r"東京\.kvo: cannot be opened"):
        read_object_list(path)
    for read in (is_object_list, read_object_list):
        with pytest.raises(ObjectError, match=r"none\.kvo: cannot be opened"):
            read(path.with_name("none.kvo"))


def test_only_the_beginning_of_a_large_file_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectlist, "_MAX_LIST_BYTES", 64)
    with pytest.raises(ObjectError, match="damaged"):
        read_object_list(path)


def test_a_list_that_cannot_be_written_is_one_line(path: Path) -> None:
    (path.parent / "taken").mkdir()
    with pytest.raises(StoreError, match="nothing was changed"):
        write_object_list(path.parent / "taken", NAMES)
