"""Pushing objects to a remote, and pulling them by name."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from chunks import content, flip, make_chunk, put_many
from served import QUICK, Server

from pictool.errors import InputError, StoreError
from pictool.store.remote import Remote
from pictool.store.store import Store
from pictool.store.transfer import pull, push


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
        assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file() and path.suffix != ".kvo"]


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
    with pytest.raises(Exception, match=f"^{path}: text does not match its checksum"):
        push(Store(far.root, remote=str(tmp_path / "there")), [path.stem])
    assert not (tmp_path / "there").exists()


def test_a_push_that_fails_leaves_nothing(far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = put_many(far, 1)
    sender = Store(far.root, remote=Remote(str(tmp_path / "there"), QUICK))
    assert sender.remote

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sender.remote._files, "mv", fail)
    with pytest.raises(StoreError, match=r"cannot be written \(No space left on device"):
        push(sender, [key])
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]


def test_http_is_read_only(far: Store, server: Server) -> None:
    keys = put_many(far, 1)
    with pytest.raises(StoreError, match=r"^http://.*: is read-only \(http\); push to the directory or bucket"):
        push(Store(far.root, remote=server.remote), keys)


def test_pulling_what_is_not_there(near: Store, far: Store) -> None:
    with pytest.raises(StoreError, match="no such object; see what was pushed"):
        pull(near, ["c" * 64])
    with pytest.raises(InputError, match="cccc: give the whole key"):
        pull(near, ["cccc"])
    with pytest.raises(InputError, match="no remote is set"):
        pull(far, ["c" * 64])
