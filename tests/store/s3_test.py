"""A remote on s3, where `s3fs` and `moto[s3]` with `flask` and `flask-cors` are installed; they are no dependencies."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks import flip, make_chunk
from served import QUICK

from pictool.errors import RemoteError
from pictool.store.remote.fetching import BLOCK
from pictool.store.remote.remote import Remote
from pictool.store.remote.transfer import pull, push
from pictool.store.store import Store

pytest.importorskip("s3fs")
pytest.importorskip("flask_cors")
moto_server = pytest.importorskip("moto.server")


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    from fsspec.config import conf

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "a", "secret": "b", "skip_instance_cache": True}
    monkeypatch.setitem(conf, "s3", options)
    remote = Remote(f"s3://{(bucket := uuid.uuid4().hex)}/objects of ours", QUICK)
    remote._files.mkdir(bucket)
    yield remote
    server.stop()


def test_push_stream_and_pull(remote: Remote, tmp_path: Path) -> None:
    far, near, third = (Store(tmp_path / name, remote=remote) for name in ("far", "near", "third"))
    keys = [far.put(make_chunk(seed, 2 * BLOCK // 64)).stem for seed in range(2)]
    assert (len(push(far, keys).keys), len(push(far, keys).present)) == (2, 2)
    for key in keys:
        with near.open(key) as file:
            file.verify()
    near.drain()
    assert pull(third, keys).keys == tuple(keys)
    for key in keys:
        assert near.path(key).read_bytes() == third.path(key).read_bytes() == far.path(key).read_bytes()
    assert not near.has("c" * 64) and remote.whole_bytes("c" * 64) is None


def test_a_damaged_object_is_refused(remote: Remote, tmp_path: Path) -> None:
    far, near = Store(tmp_path / "far"), Store(tmp_path / "near", remote=remote)
    path = far.put(make_chunk(1, 2 * BLOCK // 64))
    flip(path, BLOCK + 3)
    remote.write(path.stem, path)
    with pytest.raises(RemoteError, match=r"^s3://.*ours/objects/"), near.open(path.stem) as file:
        file.verify()
    near.drain()
    assert near.keys() == []
