"""Pushing objects to a remote, and pulling them by name."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from chunks import content, files, flip, litter, make_chunk, put_many
from served import QUICK, Server

from pictool.errors import InputError, ObjectError, StoreError
from pictool.store.files import atomic_write
from pictool.store.objects.format import encode_object
from pictool.store.remote.remote import Remote
from pictool.store.remote.transfer import pull, push
from pictool.store.store import Store
from pictool.store.upkeep import gc

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_push_and_pull(kind: str, far: Store, tmp_path: Path) -> None:
    keys = put_many(far, 3)
    url = str(tmp_path / "there") if kind == "path" else f"memory://{uuid.uuid4().hex}"
    sender, receiver = Store(far.root, remote=url), Store(tmp_path / "near", remote=url)
    first, second = push(sender, keys[:2]), push(sender, keys)
    assert (first.keys, first.present, second.keys, second.present) == (
        tuple(keys[:2]),
        (),
        (keys[2],),
        tuple(keys[:2]),
    )
    assert first.num_bytes == sum(far.path(key).stat().st_size for key in keys[:2])
    assert pull(receiver, keys).keys == tuple(keys) and content(receiver) == content(far)
    assert pull(receiver, keys).present == tuple(keys)
    if kind == "path":
        assert not [path for path in files(tmp_path / "there") if path.suffix != ".kvo"]


def test_a_push_replaces_what_has_another_size(far: Store, tmp_path: Path) -> None:
    (key,) = put_many(far, 1)
    sender = Store(far.root, remote=str(tmp_path / "there"))
    push(sender, [key])
    there = Store(tmp_path / "there").path(key)
    there.write_bytes(b"half")
    assert push(sender, [key]).keys == (key,) and there.read_bytes() == far.path(key).read_bytes()


def test_a_damaged_object_is_not_pushed(far: Store, tmp_path: Path) -> None:
    path = far.put(make_chunk(1))
    flip(path, -1)
    with pytest.raises(ObjectError, match=f"^{path}: "):
        push(Store(far.root, remote=str(tmp_path / "there")), [path.stem])
    assert not (tmp_path / "there").exists()


def test_a_push_that_fails_leaves_nothing(far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = put_many(far, 1)
    sender = Store(far.root, remote=Remote(str(tmp_path / "there"), QUICK))
    assert sender.remote

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", fail)
    with pytest.raises(StoreError, match=key):
        push(sender, [key])
    assert not files(tmp_path / "there")


def test_http_is_read_only(far: Store, server: Server) -> None:
    keys = put_many(far, 1)
    with pytest.raises(StoreError, match=f"^{server.remote}: "):
        push(Store(far.root, remote=server.remote), keys)


def test_pulling_what_is_not_there(near: Store, far: Store) -> None:
    with pytest.raises(StoreError, match="c" * 64):
        pull(near, ["c" * 64])
    with pytest.raises(InputError, match=r"^cccc: "):
        pull(near, ["cccc"])
    with pytest.raises(InputError, match="--remote"):
        pull(far, ["c" * 64])


# What is there already, and what is left there


def test_zeros_of_the_same_size_are_not_there(far: Store, tmp_path: Path) -> None:
    (key,) = put_many(far, 1)
    for url in (str(tmp_path / "there"), f"memory://{uuid.uuid4().hex}"):
        sender = Store(far.root, remote=url)
        assert sender.remote
        (tmp_path / "zeros").write_bytes(bytes(far.path(key).stat().st_size))
        sender.remote.write(key, tmp_path / "zeros")
        assert push(sender, [key]).keys == (key,) and push(sender, [key]).present == (key,)
        assert pull(Store(tmp_path / f"near-{url[:3]}", remote=url), [key]).keys == (key,)


def test_one_wrong_bit_in_a_directory_is_sent_again(far: Store, tmp_path: Path) -> None:
    key = far.put(make_chunk(1, 20_000)).stem
    sender, there = Store(far.root, remote=str(tmp_path / "there")), Store(tmp_path / "there")
    push(sender, [key])
    flip(there.path(key), 500_000)  # neither in the header nor near the end
    assert push(sender, [key]).keys == (key,) and content(there) == content(far)


@pytest.mark.parametrize("num_tokens", [5, 20_000])  # one part, and several
@pytest.mark.parametrize("kind", ["directory", "object store", "file system"])
def test_an_object_in_memory_is_written_whole_and_compared(
    kind: str, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "file system":
        monkeypatch.setattr("pictool.store.remote.remote._OBJECT_STORES", frozenset())
    url = str(tmp_path / "there") if kind == "directory" else f"memory://{uuid.uuid4().hex}"
    remote, own = Remote(url, QUICK), encode_object(make_chunk(1, num_tokens))
    key, data = own.meta.key, own.read(0, own.num_bytes)
    assert (len(own.parts) == 1) == (num_tokens == 5) and not remote.has_same(own)
    remote.write(key, own)
    assert remote.has_same(own) and remote.whole_bytes(key) == len(data)
    near = Store(tmp_path / "near", remote=remote)
    assert near.has_whole(key) and near.path(key).read_bytes() == data
    if kind == "file system":
        assert remote._files.ls(f"{remote._root}/tmp") == []
    for wrong in (b"", data[:-1], data + b"\0", _flipped(data, 100), _flipped(data, -1)):
        remote._files.pipe_file(remote._path(key), wrong)
        assert not remote.has_same(own)
    remote._files.pipe_file(remote._path(key), _flipped(data, len(data) // 2))
    assert remote.has_same(own) == (kind != "directory" and num_tokens > 5)  # neither header nor end
    remote.write(key, own)
    assert remote.has_same(own)


def _flipped(data: bytes, offset: int) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 1
    return bytes(changed)


def test_a_forced_push_sends_what_is_there(far: Store, tmp_path: Path) -> None:
    (key,) = put_many(far, 1)
    sender = Store(far.root, remote=str(tmp_path / "there"))
    push(sender, [key])
    assert push(sender, [key]).present == (key,) and push(sender, [key], force=True).keys == (key,)


def test_a_push_to_a_directory_waits_for_the_disk(far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = put_many(far, 1)
    synced, sync = list[str](), os.fsync

    def record(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        sync(fd)

    monkeypatch.setattr(os, "fsync", record)
    push(Store(far.root, remote=str(tmp_path / "there")), [key])
    shard = str(Store(tmp_path / "there").path(key).parent)
    temp = next(i for i, name in enumerate(synced) if name.endswith(".tmp"))
    assert shard in synced[temp + 1 :]


KILLED = """
import os, shutil, sys
from pictool.store.store import Store
from pictool.store.remote.transfer import push
shutil.copyfileobj = lambda source, copy, _: (copy.write(b"half"), copy.flush(), os.kill(os.getpid(), 9))
push(Store(sys.argv[1], remote=sys.argv[2]), sys.argv[3:])
"""


def test_a_killed_push_leaves_nothing_after_the_next(far: Store, tmp_path: Path) -> None:
    (key,) = put_many(far, 1)
    there = Store(tmp_path / "there")
    command = [sys.executable, "-c", KILLED, str(far.root), str(there.root), key]
    for clean in (lambda: push(Store(far.root, remote=str(there.root)), [key]), lambda: gc(there)):
        there.path(key).unlink(missing_ok=True)
        assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode == -9
        assert there.keys() == [] and len(litter(there)) == 1
        clean()
        assert not litter(there)
    assert files(there.root) == []


def test_a_push_leaves_the_temp_file_of_another_alone(far: Store, tmp_path: Path) -> None:
    (key,) = put_many(far, 1)
    there = tmp_path / "there"
    with atomic_write(there / "objects" / "aa" / "other", there / "tmp") as file:
        push(Store(far.root, remote=str(there)), [key])
        assert Path(file.name).exists()
