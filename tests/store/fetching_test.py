"""Objects that are fetched: read meanwhile, checked, moved into the store; by threads and processes, some killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from chunks import content, flip, litter, make_chunk, put_many
from served import QUICK, Server

from pictool.errors import RemoteError, StoreError
from pictool.store.entries import temp_candidates
from pictool.store.remote.fetching import BLOCK
from pictool.store.remote.remote import Remote, Retry
from pictool.store.store import Store
from pictool.store.upkeep import gc, stats, verify

ROOT = Path(__file__).parents[2]
LARGE = 3 * BLOCK // 64  # tokens of an object that takes three blocks and a bit


# Reading and counting


@pytest.mark.parametrize("kind", ["http", "file", "path", "memory"])
def test_an_object_is_read_while_it_is_fetched_and_is_then_here(
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


def interrupt_now(_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_an_object_is_opened_leaves_no_reader_that_is_waited_for(
    far: Store, near: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback of the interrupt is held meanwhile, as the command line holds it."""
    key = far.put(make_chunk(1, LARGE)).stem
    with monkeypatch.context() as patched:
        patched.setattr(near, "mark_used", interrupt_now)
        with pytest.raises(KeyboardInterrupt) as interrupt:
            near.open(key)
    near.drain()
    assert content(near) == content(far) and interrupt.tb is not None


def test_a_layer_is_read_before_what_follows_is_there(far: Store, near: Store, server: Server) -> None:
    key, server.always, server.spared = far.put(make_chunk(1, LARGE)).stem, "hang", 2 * BLOCK
    with near.open(key) as file:
        assert bytes(file.layer(0)[0]) == make_chunk(1, LARGE).layers[0][0]
        assert near.keys() == [] and len(litter(near)) == 1
        server.gate.set()
    near.drain()
    assert content(near) == content(far) and not litter(near)


def test_what_is_here_is_not_requested(far: Store, near: Store, server: Server) -> None:
    key = near.put(make_chunk(1)).stem
    far.put(make_chunk(1))
    assert near.has(key) and not server.asked


def test_ranges_do_not_overlap_and_cover_the_object(far: Store, near: Store, server: Server) -> None:
    path = far.put(make_chunk(1, LARGE))
    assert near.has(path.stem)
    assert sorted(server.asked) == [(path.stem, start) for start in range(0, path.stat().st_size, BLOCK)]


def test_blocks_that_no_reader_needs_are_fetched_too(far: Store, near: Store) -> None:
    key = far.put(make_chunk(1, LARGE)).stem
    near.open(key).close()
    near.drain()
    assert content(near) == content(far)


def test_has_counts_hits_and_misses(far: Store, near: Store) -> None:
    key = far.put(make_chunk(1)).stem
    assert [near.has(key), near.has(key), near.has("c" * 64)] == [True, True, False]
    counts = stats(near).counts
    assert (counts.hits, counts.misses, counts.writes) == (1, 2, 1)


def test_what_is_not_there(near: Store, warnings: list[str]) -> None:
    with pytest.raises(StoreError, match=f"^{'c' * 12}: .* {near.root}, .* {near.remote}; "):
        near.open("c" * 64)
    assert not near.has("c" * 64) and not warnings
    with pytest.raises(StoreError, match=r"^cccc: "):
        near.find("cccc")


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
    ("old", "new"),
    [
        (b'"version":"1"', b'"version":"2"'),
        (b'"sinks":"0"', b'"sinks":"1"'),
        (b'"format":"pictool.kvo"', b'"format":"pictool.xxx"'),
    ],
)
def test_a_header_that_can_be_parsed_is_not_trusted(
    old: bytes, new: bytes, far: Store, near: Store, server: Server
) -> None:
    path, whole = far.put(make_chunk(1)), far.put(make_chunk(2))
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    with near.open(whole.stem) as file:
        for _ in range(2):
            with pytest.raises(RemoteError, match=f"^{near.remote}.*{path.name}: "):
                near.open(path.stem)
        file.verify()  # its descriptor is still its own
    near.drain()
    assert near.keys() == [whole.stem] and not litter(near)


def test_damage_that_no_reader_met_keeps_it_out_and_is_reported(far: Store, near: Store, warnings: list[str]) -> None:
    path = far.put(make_chunk(1, LARGE))
    flip(path, -1)  # of the text
    with near.open(path.stem) as file:
        file.layer(0)
    near.drain()
    assert near.keys() == [] and not litter(near)
    (warning,) = warnings
    assert "text does not match its checksum" in warning


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
    with pytest.raises(RemoteError, match=other.stem[:12]):
        near.open(key)
    assert not near.has(key) and len(warnings) == 1
    near.drain()
    assert near.keys() == [] and not litter(near)


def test_an_object_that_is_larger_than_the_room_for_it(far: Store, server: Server, tmp_path: Path) -> None:
    path = far.put(make_chunk(1, LARGE))
    near = Store(tmp_path / "near", max_bytes=path.stat().st_size - 1, remote=server.remote)
    with pytest.raises(RemoteError, match=path.name):
        near.open(path.stem)
    near.drain()
    assert not litter(near) and len(server.asked) == 1


def test_what_failed_is_skipped_for_a_while(far: Store, near: Store, server: Server, warnings: list[str]) -> None:
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
        path = near.put(make_chunk(1))
        inode = path.stat().st_ino
    near.drain()
    assert path.stat().st_ino == inode and not litter(near)


def test_many_threads_that_open_one_object_fetch_it_once(far: Store, near: Store, server: Server) -> None:
    path = far.put(make_chunk(1, LARGE))
    results, barrier = [], threading.Barrier(8)

    def read() -> None:
        barrier.wait()
        with near.open(path.stem) as file:
            results.append([bytes(part) for layer in (0, 1) for part in file.layer(layer)])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    near.drain()
    chunk = make_chunk(1, LARGE)
    assert results == [[part for pair in chunk.layers for part in pair]] * 8
    assert len(server.asked) == len({*server.asked}) and content(near) == content(far) and not litter(near)


# Processes: killed while they fetch, many at once, ended while something is being fetched


OPEN = "file = store.open(key); file.layer(0); print('open', flush=True); "


def start(near: Path, server: Server, key: str, work: str) -> subprocess.Popen[str]:
    code = (
        f"from pictool.store.store import Store; store = Store({str(near)!r}, remote={server.url!r}); "
        f"key = {key!r}; {work}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_a_process_killed_while_it_fetches_leaves_no_half_object(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, 3 * BLOCK // 64)), Store(tmp_path / "near")
    server.always, server.spared = "hang", 2 * BLOCK
    process = start(near.root, server, path.stem, OPEN + "file.layer(1)")
    assert process.stdout and process.stdout.readline() == "open\n"
    (temp,) = temp_candidates(near.root)
    assert gc(near).litter.count == 0  # its writer lives
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert near.keys() == [] and temp.exists()
    assert gc(near).litter.count == 1 and not temp_candidates(near.root)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.01, 0.02, 0.04])
def test_a_process_killed_at_any_time_leaves_no_half_object(
    after: float, far: Store, server: Server, tmp_path: Path
) -> None:
    path, near = far.put(make_chunk(1, BLOCK // 4)), Store(tmp_path / "near")
    process = start(near.root, server, path.stem, "print('go', flush=True); store.has(key)")
    assert process.stdout and process.stdout.readline() == "go\n"
    deadline = time.monotonic() + 60
    while not server.asked and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(after)
    process.kill()
    process.communicate()
    gc(near)
    assert not verify(near).problems and not temp_candidates(near.root)
    assert near.keys() in ([], [path.stem])


def test_processes_that_open_one_object_at_once(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, BLOCK // 16)), Store(tmp_path / "near")
    work = "file = store.open(key); file.verify(); file.close(); store.drain()"
    for process in [start(near.root, server, path.stem, work) for _ in range(4)]:
        end(process)
    assert near.keys() == [path.stem] and near.path(path.stem).read_bytes() == path.read_bytes()
    assert not temp_candidates(near.root)


def test_a_process_ends_when_all_is_fetched(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, 3 * BLOCK // 64)), Store(tmp_path / "near")
    end(start(near.root, server, path.stem, OPEN + "file.close()"))
    assert near.path(path.stem).read_bytes() == path.read_bytes() and not temp_candidates(near.root)


def test_an_interrupted_process_does_not_wait(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, 16 * BLOCK // 64)), Store(tmp_path / "near")
    server.always, server.spared = "503", 2 * BLOCK
    work = "file = store.open(key); store.cancel(); file.close()"
    end(start(near.root, server, path.stem, work))
    assert near.keys() == [] and not temp_candidates(near.root)
    assert len(server.asked) < 1 + 15 * Retry().attempts  # what it would have tried


def test_a_thread_that_was_being_started_when_an_interrupt_came_ends(
    far: Store, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, started, start = far.put(make_chunk(1, 20)).stem, list[threading.Thread](), threading.Thread.start
    near = Store(tmp_path / "near", remote=Remote(server.url, QUICK))

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            near.prefetch([key])
    near.cancel()
    started[0].join(60)
    assert not started[0].is_alive()
