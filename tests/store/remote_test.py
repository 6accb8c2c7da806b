"""Objects from a remote: a real server on loopback that goes wrong in every way, and two other kinds of file system."""

from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path

import pytest
from chunks import flip, make_chunk, put_many
from served import QUICK, Server

from pictool.errors import InputError, RemoteError, StoreError
from pictool.store.fetching import BLOCK
from pictool.store.remote import Remote
from pictool.store.store import Store
from pictool.store.transfer import pull, push

LARGE = 3 * BLOCK // 64  # tokens of an object that takes three blocks and a bit


@pytest.fixture
def far(tmp_path: Path) -> Store:
    """The store that is served."""
    return Store(tmp_path / "far")


def content(store: Store) -> dict[str, bytes]:
    return {key: store.path(key).read_bytes() for key in store.keys()}


def litter(store: Store) -> list[Path]:
    return list((store.root / "tmp").iterdir()) if (store.root / "tmp").is_dir() else []


# What is there


@pytest.mark.parametrize("kind", ["http", "file", "path", "memory"])
def test_an_object_is_read_while_it_comes_and_is_then_here(
    kind: str, far: Store, server: Server, tmp_path: Path
) -> None:
    key = far.put(make_chunk(1, LARGE)).stem
    urls = {"http": server.url + "/", "file": f"file://{far.root}", "path": str(far.root)}
    remote = Remote(urls.get(kind, f"memory://{uuid.uuid4().hex}"), QUICK)
    if kind == "memory":
        remote.write(key, far.path(key))
    near = Store(tmp_path / "near", remote=remote)
    with near.open(key) as file:
        assert (file.meta, file.text(), file.tokens().tolist()) == (
            make_chunk(1, LARGE).meta,
            "text 1",
            [*range(1, LARGE + 1)],
        )
        assert [bytes(part) for part in file.layer(1)] == [*make_chunk(1, LARGE).layers[1]]
    near.drain()
    assert content(near) == content(far) and not litter(near)
    with near.open(key) as file:
        assert file.path == near.path(key)


def test_a_layer_is_read_before_what_follows_is_there(far: Store, near: Store, server: Server) -> None:
    key, server.always, server.spared = far.put(make_chunk(1, LARGE)).stem, "hang", 2 * BLOCK
    with near.open(key) as file:
        assert bytes(file.layer(0)[0]) == make_chunk(1, LARGE).layers[0][0]
        assert near.keys() == [] and len(litter(near)) == 1
        server.gate.set()
    near.drain()
    assert content(near) == content(far) and not litter(near)


def test_what_is_here_is_not_asked_for(far: Store, near: Store, server: Server) -> None:
    key = near.put(make_chunk(1)).stem
    far.put(make_chunk(1))
    assert near.has(key) and not server.asked


def test_ranges_do_not_overlap_and_cover_the_object(far: Store, near: Store, server: Server) -> None:
    path = far.put(make_chunk(1, LARGE))
    assert near.has(path.stem)
    assert sorted(server.asked) == [(path.stem, start) for start in range(0, path.stat().st_size, BLOCK)]


def test_what_no_reader_asks_for_comes_too(far: Store, near: Store) -> None:
    key = far.put(make_chunk(1, LARGE)).stem
    near.open(key).close()
    near.drain()
    assert content(near) == content(far)


def test_has_counts_hits_and_misses(far: Store, near: Store) -> None:
    from pictool.store.upkeep import stats

    key = far.put(make_chunk(1)).stem
    assert [near.has(key), near.has(key), near.has("c" * 64)] == [True, True, False]
    counts = stats(near).counts
    assert (counts.hits, counts.misses, counts.writes) == (1, 2, 1)


def test_what_is_not_there(near: Store, warnings: list[str]) -> None:
    with pytest.raises(StoreError, match=r"cccccccccccc: no such object in the store .*near, nor at http://127.0.0.1"):
        near.open("c" * 64)
    assert not near.has("c" * 64) and not warnings
    with pytest.raises(StoreError, match=r"no object with this key in the store .* is asked for whole keys"):
        near.find("cccc")


# What goes wrong on the way


@pytest.mark.parametrize("fault", ["503", "500", "429", "reset", "cut", "short", "whole"])
@pytest.mark.parametrize("spared", [0, BLOCK])
def test_what_passes_is_tried_again(fault: str, spared: int, far: Store, near: Store, server: Server) -> None:
    key = far.put(make_chunk(1, LARGE)).stem
    server.faults, server.spared = [fault, fault], spared
    assert near.has(key) and (fault == "whole" or not server.faults)
    assert content(near) == content(far) and not litter(near)


def test_a_server_without_ranges_sends_an_object_once(far: Store, near: Store, server: Server) -> None:
    key, server.always = far.put(make_chunk(1, LARGE)).stem, "whole"
    assert near.has(key) and server.asked == [(key, 0)]
    assert content(near) == content(far)


@pytest.mark.parametrize("spared", [0, BLOCK])
@pytest.mark.parametrize(
    ("fault", "why", "times"),
    [
        ("503", r"cannot be fetched \(503 Service Unavailable, tried 3 times\); try again later", 3),
        ("cut", r"cannot be fetched \(.*, tried 3 times\)", 3),
        ("reset", r"cannot be fetched \(.*, tried 3 times\)", 3),
        ("403", r"access is denied \(403 Forbidden\); see who may use", 1),
        ("401", r"access is denied \(401 Unauthorized\)", 1),
        ("410", r"cannot be fetched \(410 Gone\)", 1),
        ("wrong", r"; the object is damaged|its header is damaged", 1),
    ],
)
def test_what_does_not_pass_says_so(
    fault: str, why: str, times: int, spared: int, far: Store, near: Store, server: Server, warnings: list[str]
) -> None:
    key = far.put(make_chunk(1, BLOCK // 64 + 1)).stem  # two blocks
    server.always, server.spared = fault, spared
    with pytest.raises(RemoteError, match=why) as caught, near.open(key) as file:
        file.verify()
    assert str(caught.value).startswith(f"{near.remote}/objects/{key[:2]}/{key}.kvo: ") and "\n" not in str(
        caught.value
    )
    assert caught.value.key == key and caught.value.exit_code == 1
    assert sum(start >= spared for _, start in server.asked) == times
    near.drain()
    assert near.keys() == [] and not litter(near) and not warnings


def test_honest_but_short_answers_end(far: Store, near: Store, server: Server) -> None:
    key, server.always, server.spared = far.put(make_chunk(1, LARGE)).stem, "short", BLOCK
    with (
        pytest.raises(RemoteError, match=r"cannot be fetched \([\d,]+ of [\d,]+ bytes came, tried 3 times\)"),
        near.open(key) as file,
    ):
        file.verify()


def test_a_silent_server_is_not_waited_for(far: Store, tmp_path: Path, server: Server) -> None:
    key, server.always = far.put(make_chunk(1)).stem, "hang"
    near = Store(tmp_path / "near", remote=Remote(server.url, QUICK, timeout_s=0.1))
    with pytest.raises(RemoteError, match="cannot be fetched"):
        near.open(key)
    asked = len(server.asked)
    with pytest.raises(RemoteError, match="cannot be fetched"):  # it is known to be down
        near.open("c" * 64)
    assert len(server.asked) == asked


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

    monkeypatch.setattr(near.remote._files, "cat_file", deny)
    with pytest.raises(RemoteError, match=r"access is denied \(Permission denied\); see who may use"):
        near.open(key)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s9://bucket", "^remote s9://bucket: cannot be opened"),
        ("adl://bucket", "^remote adl://bucket: no package for adl is installed; pip install adlfs$"),
    ],
)
def test_urls_that_cannot_be_opened(url: str, why: str, tmp_path: Path) -> None:
    near = Store(tmp_path / "near", remote=url)
    with pytest.raises(InputError, match=why):
        near.has("c" * 64)


# What comes back is not trusted


@pytest.mark.parametrize("offset", [3, 20, 2000, BLOCK + 5, 2 * BLOCK, -1])
def test_a_damaged_object_is_refused(offset: int, far: Store, near: Store, warnings: list[str]) -> None:
    path = far.put(make_chunk(1, LARGE))
    flip(path, offset)
    with pytest.raises(RemoteError, match=f"^{near.remote}/objects/.*{path.stem}.kvo: "), near.open(path.stem) as file:
        file.verify()
    near.drain()
    assert near.keys() == [] and not litter(near)
    assert not near.has(path.stem)
    near.drain()
    assert near.keys() == [] and not litter(near) and str(near.remote) in warnings[0]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"version":"1"', b'"version":"2"', "format version 2, but this pic reads version 1"),
        (b'"sinks":"0"', b'"sinks":"1"', "the header does not match its checksum"),
        (b'"format":"pictool.kvo"', b'"format":"pictool.xxx"', "not an object file"),
    ],
)
def test_a_header_that_can_be_parsed_is_not_trusted(
    old: bytes, new: bytes, why: str, far: Store, near: Store, server: Server
) -> None:
    path, whole = far.put(make_chunk(1)), far.put(make_chunk(2))
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    with near.open(whole.stem) as file:
        for _ in range(2):
            with pytest.raises(RemoteError, match=why):
                near.open(path.stem)
        file.verify()  # its descriptor is still its own
    near.drain()
    assert near.keys() == [whole.stem] and not litter(near)


def test_damage_that_no_reader_met_keeps_it_out_and_is_told(far: Store, near: Store, warnings: list[str]) -> None:
    path = far.put(make_chunk(1, LARGE))
    flip(path, -1)  # of the text
    with near.open(path.stem) as file:
        file.layer(0)
    near.drain()
    assert near.keys() == [] and not litter(near)
    (warning,) = warnings
    assert "text does not match its checksum" in warning and warning.endswith("; it was not taken into the store")


@pytest.mark.parametrize("length", [0, 5, 100, 700, BLOCK, 2 * BLOCK + 1])
def test_a_truncated_object_is_refused(length: int, far: Store, near: Store) -> None:
    path = far.put(make_chunk(1, LARGE))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RemoteError), near.open(path.stem) as file:
        file.verify()
    near.drain()
    assert near.keys() == [] and not litter(near)


def test_another_object_under_its_name_is_refused(far: Store, near: Store, warnings: list[str]) -> None:
    other, key = far.put(make_chunk(2)), make_chunk(1).meta.key
    far.path(key).parent.mkdir(exist_ok=True)
    other.rename(far.path(key))
    with pytest.raises(RemoteError, match=f"holds the object {other.stem[:12]}, not what its name says"):
        near.open(key)
    assert not near.has(key) and len(warnings) == 1
    near.drain()
    assert near.keys() == [] and not litter(near)


def test_a_header_that_tells_of_more_than_there_is_room_for(far: Store, server: Server, tmp_path: Path) -> None:
    path = far.put(make_chunk(1, LARGE))
    near = Store(tmp_path / "near", max_bytes=path.stat().st_size - 1, remote=server.remote)
    with pytest.raises(RemoteError, match=r"takes 3,\d{3},\d{3} bytes, but 3,\d{3},\d{3} have room here"):
        near.open(path.stem)
    near.drain()
    assert not litter(near) and len(server.asked) == 1


def test_what_is_refused_is_not_asked_for_again(far: Store, near: Store, server: Server, warnings: list[str]) -> None:
    key, server.always = far.put(make_chunk(1)).stem, "403"
    assert not near.has(key) and not near.has(key)
    assert len(server.asked) == len(warnings) == 1


# The store it comes to


def test_a_budget_is_kept(far: Store, server: Server, tmp_path: Path) -> None:
    keys = put_many(far, 6)
    size = far.path(keys[0]).stat().st_size
    near = Store(tmp_path / "near", max_bytes=3 * size, remote=server.remote)
    for key in keys:
        assert near.has(key)
        assert len(near.keys()) <= 3 and key in near.keys()


def test_what_was_compiled_meanwhile_stays(far: Store, near: Store) -> None:
    key = far.put(make_chunk(1)).stem
    with near.open(key):
        mine = near.put(make_chunk(1))
        inode = mine.stat().st_ino
    near.drain()
    assert mine.stat().st_ino == inode and not litter(near)


def test_many_threads_that_want_one_object_fetch_it_once(far: Store, near: Store, server: Server) -> None:
    path = far.put(make_chunk(1, LARGE))
    found, barrier = [], threading.Barrier(8)

    def read() -> None:
        barrier.wait()
        with near.open(path.stem) as file:
            found.append([bytes(part) for layer in (0, 1) for part in file.layer(layer)])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    near.drain()
    chunk = make_chunk(1, LARGE)
    assert found == [[part for pair in chunk.layers for part in pair]] * 8
    assert len(server.asked) == len({*server.asked}) and content(near) == content(far) and not litter(near)


# Sending and fetching by name


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
