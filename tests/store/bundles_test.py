"""Archives: the same objects in another store, byte for byte, or nothing. Object lists: read as written, or refused."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from chunks import content, flip, forged, litter, make_chunk
from safetensors import safe_open

from pictool.core import Geometry, Target
from pictool.errors import ForeignObjectError, InputError, ObjectError, StoreError
from pictool.store.objects import bundles
from pictool.store.objects.bundles import (
    ListMember,
    export_archive,
    import_archive,
    is_object_list,
    read_object_list,
    write_object_list,
)
from pictool.store.objects.format import CompiledChunk, ObjectMeta, write_object
from pictool.store.store import Store
from pictool.store.upkeep import verify

# Archives


@pytest.fixture
def archive(store: Store, tmp_path: Path) -> Path:
    for seed in range(5):
        store.put(make_chunk(seed))
    export_archive(store, store.keys(), tmp_path / "all.kva")
    return tmp_path / "all.kva"


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "other")


def packed(members: dict[str, bytes], path: Path) -> Path:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    path.write_bytes(zstandard.compress(data.getvalue()))
    return path


def manifest(keys: list[str], **more: str) -> bytes:
    return json.dumps({"format": "pictool.archive", "keys": keys, "version": "1"} | more).encode()


def test_the_other_store_has_the_same_bytes(store: Store, other: Store, archive: Path) -> None:
    done = import_archive(other, archive)
    assert content(other) == content(store) and verify(other).problems == {}
    assert done.keys == done.new == tuple(store.keys())
    assert import_archive(other, archive).new == ()


def test_any_tar_reads_it(store: Store, archive: Path) -> None:
    with tarfile.open(
        fileobj=io.BytesIO(zstandard.ZstdDecompressor().stream_reader(archive.read_bytes()).read())
    ) as tar:
        assert tar.getnames() == ["archive.json", *(f"{key}.kvo" for key in store.keys())]
        first = tar.extractfile(f"{store.keys()[0]}.kvo")
        assert first is not None and first.read() == content(store)[store.keys()[0]]


def test_the_same_objects_give_the_same_bytes(store: Store, archive: Path, tmp_path: Path) -> None:
    export_archive(store, [*reversed(store.keys()), store.keys()[0]], tmp_path / "again.kva")
    assert (tmp_path / "again.kva").read_bytes() == archive.read_bytes()


def test_damage_is_not_exported(store: Store, archive: Path, tmp_path: Path) -> None:
    flip(store.path(store.keys()[2]), -1)
    with pytest.raises(ObjectError, match=f"^{store.path(store.keys()[2])}: "):
        export_archive(store, store.keys(), tmp_path / "bad.kva")
    with pytest.raises(StoreError, match=f"^{'c' * 12}: "):
        export_archive(store, ["c" * 64], tmp_path / "bad.kva")
    assert not (tmp_path / "bad.kva").exists()


def test_damage_is_not_imported(store: Store, other: Store, archive: Path) -> None:
    whole, known = archive.read_bytes(), content(store)
    for at in range(0, len(whole), 61):
        archive.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            import_archive(other, archive)
        except InputError as error:
            assert str(archive) in str(error) and "\n" not in str(error)
        assert content(other).items() <= known.items()


def test_truncation_of_an_archive_is_refused(store: Store, other: Store, archive: Path) -> None:
    whole = archive.read_bytes()
    for size in range(0, len(whole) - 40, 97):
        archive.write_bytes(whole[:size])
        with pytest.raises(InputError, match=f"^{archive}: "):
            import_archive(other, archive)
    assert content(other).items() <= content(store).items()


def test_what_is_whole_replaces_what_is_damaged(store: Store, archive: Path) -> None:
    before, key = content(store), store.keys()[1]
    flip(store.path(key), -1)
    assert import_archive(store, archive).new == (key,)
    assert content(store) == before


@pytest.mark.parametrize("name", ["../../evil.kvo", "/tmp/evil.kvo", "a.kvo", "A" * 64 + ".kvo"])
def test_members_of_other_names_are_refused(tmp_path: Path, other: Store, name: str) -> None:
    keys = [name.removesuffix(".kvo")]
    with pytest.raises(InputError, match=f"^{tmp_path / 'evil.kva'}: "):
        import_archive(other, packed({"archive.json": manifest(keys), name: b"x"}, tmp_path / "evil.kva"))
    with pytest.raises(InputError, match="0" * 64):
        import_archive(other, packed({"archive.json": manifest(["0" * 64]), name: b"x"}, tmp_path / "evil.kva"))
    assert other.keys() == []


def test_an_object_under_another_name_is_refused(store: Store, other: Store, tmp_path: Path) -> None:
    data = store.put(make_chunk(1)).read_bytes()
    members = {"archive.json": manifest(["0" * 64]), f"{'0' * 64}.kvo": data}
    with pytest.raises(InputError, match=f"^{tmp_path / 'swapped.kva'}: "):
        import_archive(other, packed(members, tmp_path / "swapped.kva"))
    assert other.keys() == []


ODD = {
    "empty": b"", "text": b"no archive" * 100, "zeros": bytes(5000), "empty frame": zstandard.compress(b""),
    "no tar": zstandard.compress(b"x" * 5000),
}  # fmt: skip


@pytest.mark.parametrize("data", ODD.values(), ids=ODD.keys())
def test_what_is_no_archive_is_refused(tmp_path: Path, other: Store, data: bytes) -> None:
    (tmp_path / "odd.kva").write_bytes(data)
    with pytest.raises(InputError, match=f"^{tmp_path / 'odd.kva'}: "):
        import_archive(other, tmp_path / "odd.kva")


def test_odd_manifests(tmp_path: Path, other: Store) -> None:
    path = tmp_path / "odd.kva"
    for text in (b"", b"[]", b"{}", b"\xff", manifest([]).replace(b"[]", b"7"), manifest([], format="x")):
        with pytest.raises(InputError, match=f"^{path}: "):
            import_archive(other, packed({"archive.json": text}, path))
    with pytest.raises(ForeignObjectError, match=f"^{path}: "):
        import_archive(other, packed({"archive.json": manifest([], version="2")}, path))
    with pytest.raises(InputError, match=f"^{path}: "):
        import_archive(other, packed({"archive.json": manifest([]), "more": b""}, path))


# Hostile archives: refused before anything is written


def tar_of(members: list[tuple[tarfile.TarInfo, bytes]], path: Path) -> Path:
    """An archive of these members, whatever they say, after a manifest of the keys in their names."""
    keys = list(dict.fromkeys(info.name[:64] for info, _ in members))
    text = manifest(keys)
    blocks = [member("archive.json", len(text)).tobuf() + text + bytes(-len(text) % 512)]
    blocks += [info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512) for info, data in members]
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(blocks) + bytes(10240)))
    return path


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
        tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE,
        tarfile.XGLTYPE, b"Z",
    ],
)  # fmt: skip
def test_only_regular_members_are_taken(kind: bytes, store: Store, other: Store, tmp_path: Path) -> None:
    path = store.put(make_chunk(1))
    for size in (0, path.stat().st_size, 1 << 40):
        info = member(path.name, size, kind, "/etc/passwd")
        with pytest.raises(InputError, match=path.name):
            import_archive(other, tar_of([(info, path.read_bytes())], tmp_path / "odd.kva"))
    assert not other.root.exists()


@pytest.mark.parametrize("size", [1, 3000, 1 << 30, 1 << 40, (1 << 70)])
def test_a_member_of_a_false_size_is_not_written(size: int, store: Store, other: Store, tmp_path: Path) -> None:
    path = store.put(make_chunk(1))
    odd = tar_of([(member(path.name, size), path.read_bytes() + bytes(4096))], tmp_path / "odd.kva")
    with pytest.raises(InputError, match=f"^{odd}: "):
        import_archive(other, odd)
    assert not other.root.exists()


def test_a_bomb_is_refused_by_its_beginning(other: Store, tmp_path: Path) -> None:
    """4 GB of zeros in 130 KB: neither written nor kept."""
    key, size = "a" * 64, 4 << 30
    header = member("archive.json", len(manifest([key]))).tobuf() + manifest([key]).ljust(512, b"\0")
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    with (tmp_path / "bomb.kva").open("wb") as file:
        file.write(compressor.compress(header + member(f"{key}.kvo", size).tobuf(tarfile.GNU_FORMAT)))
        for _ in range(64):
            file.write(compressor.compress(bytes(1 << 24)))
        file.write(compressor.flush())
    tracemalloc.start()
    with pytest.raises(InputError, match=f"^{tmp_path / 'bomb.kva'}: "):
        import_archive(other, tmp_path / "bomb.kva")
    assert tracemalloc.get_traced_memory()[1] < 1 << 25 and not other.root.exists()
    tracemalloc.stop()


def test_an_endless_tail_is_not_read(store: Store, other: Store, tmp_path: Path) -> None:
    path = store.put(make_chunk(1))
    text, data = manifest([path.stem]), path.read_bytes()
    whole = member("archive.json", len(text)).tobuf() + text.ljust(512, b"\0")
    whole += member(path.name, len(data)).tobuf() + data + bytes(-len(data) % 512)
    (tmp_path / "long.kva").write_bytes(zstandard.compress(whole + bytes(1 << 26)))
    with pytest.raises(InputError, match=f"^{tmp_path / 'long.kva'}: "):
        import_archive(other, tmp_path / "long.kva")
    assert not other.root.exists()


def test_a_member_that_comes_twice_is_refused(store: Store, other: Store, tmp_path: Path) -> None:
    path = store.put(make_chunk(1))
    twice = (member(path.name, path.stat().st_size), path.read_bytes())
    with pytest.raises(InputError, match=f"^{tmp_path / 'twice.kva'}: "):
        import_archive(other, tar_of([twice, twice], tmp_path / "twice.kva"))
    with pytest.raises(InputError, match=f"^{tmp_path / 'twice.kva'}: "):
        import_archive(other, packed({"archive.json": manifest([path.stem] * 2)}, tmp_path / "twice.kva"))
    assert not other.root.exists()


def test_a_refused_archive_leaves_nothing(store: Store, other: Store, tmp_path: Path) -> None:
    """The last of three objects does not match its checksums; the first two were whole."""
    paths = [store.put(make_chunk(seed)) for seed in range(3)]
    flip(paths[2], -1)
    kept = other.put(make_chunk(1))
    odd = tar_of([(member(path.name, path.stat().st_size), path.read_bytes()) for path in paths], tmp_path / "odd.kva")
    with pytest.raises(InputError, match=f"^{odd}: "):
        import_archive(other, odd)
    assert other.keys() == [kept.stem] and not litter(other)


def test_an_archive_larger_than_the_room_for_it(archive: Path, store: Store, tmp_path: Path) -> None:
    small = Store(tmp_path / "small", max_bytes=4 * store.path(store.keys()[0]).stat().st_size)
    with pytest.raises(InputError, match=f"^{archive}: "):
        import_archive(small, archive)
    assert not small.root.exists()


def test_a_forged_object_is_not_imported(store: Store, other: Store, tmp_path: Path) -> None:
    """Every checksum holds, but the key is not that of its content."""
    path = store.put(forged(make_chunk(1), make_chunk(2).meta.key))
    odd = tar_of([(member(path.name, path.stat().st_size), path.read_bytes())], tmp_path / "odd.kva")
    with pytest.raises(InputError, match=f"^{odd}: "):
        import_archive(other, odd)
    assert other.keys() == []


def test_what_is_no_file_is_no_archive(other: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match=f"^{name}: "):
            import_archive(other, name)
    with pytest.raises(InputError, match=f"^{tmp_path / 'none'}: "):
        import_archive(other, tmp_path / "none")


# Object lists


TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(layers=1, kv_heads=1, head_dim=1))


NAMES = ["book.0000.kvo", "book.0001.kvo", 'a b "c" 東京.kvo']


def write_member(path: Path, token: int) -> str:
    tokens = np.asarray([token], dtype=np.int32)
    meta = ObjectMeta(TARGET.key(tokens, "none"), TARGET, 1, "none")
    with path.open("wb") as file:
        write_object(file, CompiledChunk(meta, str(token), tokens, [(bytes(4), bytes(4))]))
    return meta.key


def members(folder: Path, names: Sequence[str] = NAMES) -> list[ListMember]:
    """Members in a folder: the second one continues the first, a third one is apart."""
    return [ListMember(folder / name, index == 1) for index, name in enumerate(names)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A list with its members beside it."""
    for token, name in enumerate(NAMES):
        write_member(tmp_path / name, token)
    write_object_list(tmp_path / "book.kvo", members(tmp_path))
    return tmp_path / "book.kvo"


def forge(path: Path, objects: object, version: str = "1") -> None:
    """A list with a checksum that holds, of a writer that is not ours."""
    text = json.dumps(objects)
    checksum = blake3(text.encode()).hexdigest()
    metadata = {"checksum": checksum, "format": "pictool.list", "objects": text, "version": version}
    raw = json.dumps({"__metadata__": metadata}).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


def test_an_object_list_comes_back(path: Path) -> None:
    assert is_object_list(path)
    assert read_object_list(path) == members(path.parent)


def test_a_member_may_stand_twice_and_a_list_be_empty(path: Path) -> None:
    for names in ([], [NAMES[0], NAMES[0]]):
        write_object_list(path, members(path.parent, names))
        assert read_object_list(path) == members(path.parent, names)


def test_a_list_of_an_earlier_version_has_the_pieces_of_one_text(path: Path) -> None:
    listed = [[member.path.name, bundles._member_key(member.path)] for member in members(path.parent)]
    forge(path, listed)
    assert [member.continues for member in read_object_list(path)] == [False, True, True]


def test_a_list_moves_with_its_members(path: Path, tmp_path: Path) -> None:
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    os.chdir(moved)
    assert read_object_list(Path("book.kvo")) == members(Path())


def test_safetensors_reads_a_list(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        assert list(file.keys()) == []
        assert [name for name, *_ in json.loads(file.metadata()["objects"])] == NAMES


def test_the_same_members_give_the_same_bytes(path: Path) -> None:
    before = path.read_bytes()
    write_object_list(path, members(path.parent))
    assert path.read_bytes() == before


def test_an_object_is_no_list(path: Path) -> None:
    assert not is_object_list(path.parent / NAMES[0])
    with pytest.raises(ObjectError, match=f"^{path.parent / NAMES[0]}: "):
        read_object_list(path.parent / NAMES[0])


def test_every_flipped_byte_of_a_list_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset, byte in enumerate(whole):
            for bits in (0x01, 0x20, 0xFF):
                os.pwrite(file.fileno(), bytes([byte ^ bits]), offset)
                with pytest.raises(ObjectError):
                    read_object_list(path)
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert path.read_bytes() == whole


def test_every_truncation_of_a_list_is_refused(path: Path) -> None:
    for size in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(ObjectError, match=f"^{path}: "):
            read_object_list(path)


@pytest.mark.parametrize("more", [b" ", b"\0", b" " * 8, b"{}"])
def test_bytes_after_the_end_of_a_list_are_refused(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(ObjectError, match=f"^{path}: "):
        read_object_list(path)


@pytest.mark.parametrize("objects", ["abc", None, 7, {"a": "b"}, ["a", "b"], ["ab"], [["a"]], [[1, 2]], [[None, None]]])
def test_odd_members_are_refused(path: Path, objects: object) -> None:
    forge(path, objects)
    with pytest.raises(ObjectError, match=f"^{path}: "):
        read_object_list(path)


def test_deep_nesting_is_refused(path: Path) -> None:
    path.write_bytes(bytes(8) + b"[" * 200_000)
    with pytest.raises(ObjectError, match=f"^{path}: "):
        read_object_list(path)


@pytest.mark.parametrize("name", ["../one.kvo", "/etc/hostname", "sub/one.kvo", "..", ".", "", "./one.kvo", "a\0b"])
def test_a_member_outside_the_directory_is_refused(path: Path, name: str) -> None:
    (path.parent / "sub").mkdir()
    write_member(path.parent.parent / "one.kvo", 1)
    forge(path, [[name, write_member(path.parent / "sub" / "one.kvo", 1)]])
    with pytest.raises(ObjectError, match=f"^{path}: "):
        read_object_list(path)


def test_another_version_is_refused_naming_both(path: Path) -> None:
    forge(path, [], version="2")
    with pytest.raises(ForeignObjectError, match=f"^{path}: "):
        read_object_list(path)


def test_a_member_that_was_written_over_is_refused(path: Path) -> None:
    write_member(path.parent / NAMES[1], 77)
    with pytest.raises(ObjectError, match=f"^{path.parent / NAMES[1]}: .* {path} "):
        read_object_list(path)


def test_a_list_in_a_list_is_refused(path: Path) -> None:
    with pytest.raises(ObjectError, match=f"^{path}: "):
        write_object_list(path.with_name("outer.kvo"), members(path.parent, ["book.kvo"]))
    forge(path, [["book.kvo", "a" * 64]])
    with pytest.raises(ObjectError, match=f"^{path}: "):
        read_object_list(path)


def test_a_missing_member_or_list_is_named(path: Path) -> None:
    (path.parent / NAMES[2]).unlink()
    with pytest.raises(ObjectError, match=NAMES[2]):
        read_object_list(path)
    for read in (is_object_list, read_object_list):
        with pytest.raises(ObjectError, match=r"none\.kvo: "):
            read(path.with_name("none.kvo"))


def test_only_the_beginning_of_a_large_file_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_MAX_LIST_BYTES", 64)
    with pytest.raises(ObjectError, match=f"^{path}: "):
        read_object_list(path)


def test_a_list_that_cannot_be_written_is_one_line(path: Path) -> None:
    (path.parent / "taken").mkdir()
    with pytest.raises(StoreError, match=f"^{path.parent / 'taken'}: "):
        write_object_list(path.parent / "taken", members(path.parent))
