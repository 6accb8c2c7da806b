"""A remote: a real server on loopback that goes wrong in every way, and URLs that cannot be used."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import tracemalloc
from asyncio import CancelledError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from chunks import content, litter, make_chunk
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from served import QUICK, Server

from pictool.errors import InputError, RemoteError
from pictool.store.remote.fetching import BLOCK
from pictool.store.remote.remote import Remote, Retry
from pictool.store.store import Store

LARGE = 3 * BLOCK // 64  # tokens of an object that takes three blocks and a bit


@pytest.mark.parametrize("fault", ["503", "500", "429", "reset", "cut", "short", "whole"])
@pytest.mark.parametrize("spared", [0, BLOCK])
def test_what_passes_is_tried_again(fault: str, spared: int, far: Store, near: Store, server: Server) -> None:
    key = far.put(make_chunk(1, LARGE)).stem
    server.faults, server.spared = [fault, fault], spared
    assert near.has(key) and (fault == "whole" or not server.faults)
    assert content(near) == content(far) and not litter(near)


def test_a_server_without_ranges_sends_the_whole_object_once(far: Store, near: Store, server: Server) -> None:
    key, server.always = far.put(make_chunk(1, LARGE)).stem, "whole"
    assert near.has(key) and server.asked == [(key, 0)] * 2  # its first bytes, then all of it
    assert content(near) == content(far)


@pytest.mark.parametrize("spared", [0, BLOCK])
@pytest.mark.parametrize(
    ("fault", "cause", "times"),
    [
        ("503", "503 Service Unavailable", 3),
        ("cut", "", 3),
        ("reset", "", 3),
        ("403", "403 Forbidden", 1),
        ("401", "401 Unauthorized", 1),
        ("410", "410 Gone", 1),
        ("wrong", "", 1),
    ],
)
def test_what_does_not_pass_says_so(
    fault: str, cause: str, times: int, spared: int, far: Store, near: Store, server: Server, warnings: list[str]
) -> None:
    key = far.put(make_chunk(1, BLOCK // 64 + 1)).stem  # two blocks
    server.always, server.spared = fault, spared
    named = f"^{near.remote}/objects/{key[:2]}/{key}.kvo: .*{cause}"
    with pytest.raises(RemoteError, match=named) as caught, near.open(key) as file:
        file.verify()
    assert "\n" not in str(caught.value)
    assert caught.value.key == key and caught.value.exit_code == 1
    assert sum(start >= spared for _, start in server.asked) == times
    near.drain()
    assert near.keys() == [] and not litter(near) and not warnings


def test_honest_but_short_answers_end(far: Store, near: Store, server: Server) -> None:
    key, server.always, server.spared = far.put(make_chunk(1, LARGE)).stem, "short", BLOCK
    with (
        pytest.raises(RemoteError, match=key),
        near.open(key) as file,
    ):
        file.verify()


def test_a_silent_server_is_not_waited_for(far: Store, tmp_path: Path, server: Server) -> None:
    key, server.always = far.put(make_chunk(1)).stem, "hang"
    near = Store(tmp_path / "near", remote=Remote(server.url, QUICK, timeout_s=0.1))
    with pytest.raises(RemoteError, match=key):
        near.open(key)
    asked = len(server.asked)
    with pytest.raises(RemoteError, match="c" * 64):  # it is known to be down
        near.open("c" * 64)
    assert len(server.asked) == asked


# Hostile servers: bounded in bytes, in memory and in time


HASTY = Retry(attempts=2, first_s=0.01, most_s=0.02)


def hostile(server: Server, tmp_path: Path, warnings: list[str]) -> Store:
    """A store with a remote that gives little time."""
    remote = Remote(server.url, HASTY, timeout_s=1, min_rate=1e7)
    return Store(tmp_path / "hostile", remote=remote, on_warning=warnings.append)


@pytest.mark.parametrize("spared", [0, BLOCK])
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("endless", r"more than the requested [\d,]+ bytes"),
        ("more", r"more than the requested [\d,]+ bytes"),
        ("overlong", r"more than the requested [\d,]+ bytes"),
        ("gzip", "the server encodes"),
        ("drip", "too slow"),
        ("slow head", "cannot be fetched"),
        ("loop", "more than 5 redirects"),
    ],
)
def test_what_a_hostile_server_sends_is_bounded(
    fault: str, why: str, spared: int, far: Store, server: Server, tmp_path: Path, warnings: list[str]
) -> None:
    key, near = far.put(make_chunk(1, LARGE)).stem, hostile(server, tmp_path, warnings)
    server.always, server.spared = fault, spared
    is_harmless = spared > 0 and fault in ("endless", "more")  # no more than the ranges is read
    tracemalloc.start()
    started = time.monotonic()
    assert near.has(key) == is_harmless
    seconds, peak = time.monotonic() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 60 and peak < 1 << 28 and server.num_zeros < 1 << 26
    near.drain()
    assert not litter(near) and near.keys() == [key] * is_harmless
    if not is_harmless:
        assert len(warnings) == 1 and re.search(why, warnings[0]), warnings


def test_a_header_does_not_reserve_what_there_is_no_room_for(far: Store, tmp_path: Path, warnings: list[str]) -> None:
    path = far.put(make_chunk(1, 9))
    for end in (1 << 50, 1 << 70, "1e400", -1, 10**4000):
        header = {"__metadata__": {}, "x": {"data_offsets": [0, end], "dtype": "U8", "shape": [1]}}
        raw = json.dumps(header).replace('"1e400"', "1e400").encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw)
        store = Store(tmp_path / "near", remote=str(far.root), on_warning=warnings.append)
        assert not store.has(path.stem)
        store.drain()
        assert not litter(store)
    assert len(warnings) == 5


def test_a_pipe_in_a_directory_is_not_waited_for(far: Store, tmp_path: Path) -> None:
    key = "c" * 64
    far.path(key).parent.mkdir(parents=True)
    near = Store(tmp_path / "near", remote=str(far.root))
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        make(far.path(key))
        with pytest.raises(RemoteError, match=str(far.root)):
            near.open(key)
        far.path(key).rmdir() if far.path(key).is_dir() else far.path(key).unlink()
    other = far.put(make_chunk(1)).stem
    assert near.has(other)  # the directory is not down for it


def test_nobody_listens(tmp_path: Path, warnings: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    near = Store(tmp_path / "near", remote=Remote(url, QUICK), on_warning=warnings.append)
    assert not near.has("c" * 64)
    (warning,) = warnings
    assert warning.startswith(f"{url}/objects/cc/{'c' * 64}.kvo: cannot be fetched (") and "compiled here" in warning


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    near = Store(tmp_path / "near", remote=Remote("http://me:secret@127.0.0.1:1/store", QUICK))
    with pytest.raises(RemoteError, match=r"^http://127\.0\.0\.1:1/store/objects/") as caught:
        near.open("c" * 64)
    assert "secret" not in str(caught.value) + str(near.remote)


def test_a_directory_that_may_not_be_read(far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = far.put(make_chunk(1)).stem
    near = Store(tmp_path / "near", remote=Remote(str(far.root), QUICK))
    assert near.remote

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pictool.store.remote.remote._read_local", deny)
    with pytest.raises(RemoteError, match=str(far.root)):
        near.open(key)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("s9://bucket", "fsspec"),
        ("adl://bucket", "pip install adlfs"),
    ],
)
def test_urls_that_cannot_be_opened(url: str, remedy: str, tmp_path: Path) -> None:
    near = Store(tmp_path / "near", remote=url)
    with pytest.raises(InputError, match=f"^remote {url}: .*{remedy}"):
        near.has("c" * 64)


def test_what_is_absent_is_absent_though_a_file_system_names_a_cause(tmp_path: Path, warnings: list[str]) -> None:
    """As s3's and fsspec's own in memory do."""
    remote = Remote(f"memory://{tmp_path.name}", QUICK)
    assert remote.whole_bytes("a" * 64) is None
    near = Store(tmp_path / "near", remote=remote, on_warning=warnings.append)
    assert not near.has("a" * 64) and not warnings


@pytest.mark.parametrize("error", [CancelledError, KeyError, StopIteration])
def test_whatever_a_file_system_raises_is_an_error_of_the_remote(error: type[BaseException], tmp_path: Path) -> None:
    class Failing(MemoryFileSystem):  # type: ignore[misc]
        protocol = "failing"

        def cat_file(self, *_: object, **__: object) -> bytes:
            raise error

    register_implementation("failing", Failing, clobber=True)
    with pytest.raises(RemoteError, match="a" * 64):
        Store(tmp_path / "near", remote=Remote("failing://x", QUICK)).fetch("a" * 64)


def test_configured_secrets_stay_with_the_host_that_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a redirect to another port, which is another origin; one to the same origin has them."""
    secrets = {
        "headers": {"Authorization": "Bearer of-a", "X-Api-Key": "of-b"},
        "client_kwargs": {"headers": {"X-Token": "of-c"}, "cookies": {"session": "of-d"}},
    }
    monkeypatch.setitem(fsspec.config.conf, "http", secrets)
    asked = list[tuple[str, str]]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.headers["Host"], str(self.headers)))
            where = {f"127.0.0.1:{ports[0]}": f"http://127.0.0.1:{ports[1]}"}.get(self.headers["Host"])
            if where is not None and not self.path.startswith("/moved"):
                where = f"http://{self.headers['Host']}/moved"
            self.send_response(404 if where is None else 302)
            if where is not None:
                self.send_header("Location", where + "/x")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    ports = [server.server_port for server in servers]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert Remote(f"http://127.0.0.1:{ports[0]}", Retry(attempts=1)).read("a" * 64, 0, 10) is None
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    assert [host.rpartition(":")[2] for host, _ in asked] == [str(ports[0]), str(ports[0]), str(ports[1])]
    first, moved, other = (headers for _, headers in asked)
    assert all(f"of-{letter}" in headers for headers in (first, moved) for letter in "abcd")
    assert "of-" not in other
