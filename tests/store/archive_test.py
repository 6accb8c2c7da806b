"""Archives: the same objects in another store, byte for byte; and nothing from a damaged one."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import zstandard
from chunks import flip, make_chunk

from pictool.errors import ForeignObjectError, InputError, ObjectError, StoreError
from pictool.store.bundles import export_archive, import_archive
from pictool.store.store import Store
from pictool.store.upkeep import verify


@pytest.fixture
def archive(store: Store, tmp_path: Path) -> Path:
    for seed in range(5):
        store.put(make_chunk(seed))
    export_archive(store, store.keys(), tmp_path / "all.kva")
    return tmp_path / "all.kva"


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "other")


def content(store: Store) -> dict[str, bytes]:
    return {key: store.path(key).read_bytes() for key in store.keys()}


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
    with pytest.raises(ObjectError, match="does not match its checksum"):
        export_archive(store, store.keys(), tmp_path / "bad.kva")
    with pytest.raises(StoreError, match="no such object"):
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


def test_truncation_is_refused(store: Store, other: Store, archive: Path) -> None:
    whole = archive.read_bytes()
    for size in range(0, len(whole) - 40, 97):
        archive.write_bytes(whole[:size])
        with pytest.raises(InputError, match="damaged"):
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
    with pytest.raises(InputError, match="damaged"):
        import_archive(other, packed({"archive.json": manifest(keys), name: b"x"}, tmp_path / "evil.kva"))
    with pytest.raises(InputError, match="damaged"):
        import_archive(other, packed({"archive.json": manifest(["0" * 64]), name: b"x"}, tmp_path / "evil.kva"))
    assert other.keys() == []


def test_an_object_under_another_name_is_refused(store: Store, other: Store, tmp_path: Path) -> None:
    data = store.put(make_chunk(1)).read_bytes()
    members = {"archive.json": manifest(["0" * 64]), f"{'0' * 64}.kvo": data}
    with pytest.raises(InputError, match="not what its name says"):
        import_archive(other, packed(members, tmp_path / "swapped.kva"))
    assert other.keys() == []


ODD = {
    "empty": b"", "text": b"no archive" * 100, "zeros": bytes(5000), "empty frame": zstandard.compress(b""),
    "no tar": zstandard.compress(b"x" * 5000),
}  # fmt: skip


@pytest.mark.parametrize("data", ODD.values(), ids=ODD.keys())
def test_what_is_no_archive_is_refused(tmp_path: Path, other: Store, data: bytes) -> None:
    (tmp_path / "odd.kva").write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        import_archive(other, tmp_path / "odd.kva")


def test_odd_manifests(tmp_path: Path, other: Store) -> None:
    path = tmp_path / "odd.kva"
    for text in (b"", b"[]", b"{}", b"\xff", manifest([]).replace(b"[]", b"7"), manifest([], format="x")):
        with pytest.raises(InputError, match="manifest"):
            import_archive(other, packed({"archive.json": text}, path))
    with pytest.raises(ForeignObjectError, match="version 2, but this pic reads version 1"):
        import_archive(other, packed({"archive.json": manifest([], version="2")}, path))
    with pytest.raises(InputError, match="holds more than it says"):
        import_archive(other, packed({"archive.json": manifest([]), "more": b""}, path))
