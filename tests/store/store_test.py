"""The store: objects by key, whole or not there, whatever happens and however many write at once."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from chunks import files, make_chunk

import pictool.store.store as store_module
from pictool.errors import ObjectError, StoreError
from pictool.store.objects.format import CompiledChunk
from pictool.store.store import Store


def rename_key(store: Store, chunk: CompiledChunk, key: str) -> str:
    """An object under a key of our choice: its file says otherwise."""
    store.path(key).parent.mkdir(parents=True, exist_ok=True)
    store.put(chunk).rename(store.path(key))
    return key


# Putting and finding


def test_put_and_open(store: Store) -> None:
    chunk = make_chunk(1)
    assert not store.has(chunk.meta.key) and store.keys() == [] and not store.root.exists()
    path = store.put(chunk)
    assert path == store.path(chunk.meta.key) and store.has(chunk.meta.key)
    with store.open(chunk.meta.key) as file:
        file.verify()
        assert (file.meta, file.text(), file.tokens().tolist()) == (chunk.meta, "text 1", [1, 2, 3, 4, 5])
    assert files(store.root) == [path]


def test_putting_twice_gives_the_same_bytes(store: Store) -> None:
    before = store.put(make_chunk(1)).read_bytes()
    assert store.put(make_chunk(1)).read_bytes() == before
    assert len(files(store.root)) == 1


def test_keys_are_sorted_and_strays_are_not_keys(store: Store) -> None:
    keys = sorted(store.put(make_chunk(seed)).stem for seed in range(5))
    (store.root / "objects" / "zz").mkdir()
    (store.root / "objects" / "zz" / "misplaced.kvo").write_bytes(b"")
    (store.root / "objects" / keys[0][:2] / "notes.txt").write_bytes(b"")
    assert store.keys() == keys


def test_opening_what_is_not_there(store: Store) -> None:
    with pytest.raises(StoreError, match=f"^{'c' * 12}: "):
        store.open("c" * 64)


def test_an_object_under_another_s_name_is_refused(store: Store) -> None:
    chunk = make_chunk(1)
    key = rename_key(store, chunk, "c" * 64)
    assert not store.has(key)
    with pytest.raises(ObjectError, match=chunk.meta.key[:12]):
        store.open(key)


def test_a_damaged_object_is_there_only_to_be_replaced(store: Store) -> None:
    path = store.put(make_chunk(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert not store.has(path.stem)
    with pytest.raises(ObjectError):
        store.open(path.stem)
    assert store.put(make_chunk(1)).read_bytes() == whole


def test_an_open_object_outlives_its_replacement_and_removal(store: Store) -> None:
    path = store.put(make_chunk(1))
    with store.open(path.stem) as file:
        store.put(make_chunk(1))
        path.unlink()
        file.verify()


# Abbreviated keys, as in git


@pytest.fixture
def abbreviated(store: Store) -> Store:
    for number, key in enumerate(("abcd" + "0" * 60, "abcd" + "1" * 60, "abce" + "0" * 60)):
        rename_key(store, make_chunk(number), key)
    return store


@pytest.mark.parametrize("prefix", ["abce", "abce0", "abce" + "0" * 60])
def test_a_unique_abbreviation(abbreviated: Store, prefix: str) -> None:
    assert abbreviated.resolve(prefix) == "abce" + "0" * 60


@pytest.mark.parametrize(
    ("prefix", "why"),
    [
        ("abcd", "abcd"),
        ("dddd", "dddd"),
        ("abce1", "abce1"),
        ("abc", "'abc'"),
        ("", "''"),
        ("ABCE", "'ABCE'"),
        ("abce*", "'abce*'"),
        ("../abce", "'../abce'"),
        ("a" * 65, "'aaaa"),
        ("abce\n", "'abce"),
    ],
)
def test_other_abbreviations_say_why(abbreviated: Store, prefix: str, why: str) -> None:
    with pytest.raises(StoreError) as caught:
        abbreviated.resolve(prefix)
    assert why in str(caught.value) and "\n" not in str(caught.value)


# Listing


def test_objects_lists_the_damaged_with_the_others(store: Store) -> None:
    paths = [store.put(make_chunk(seed)) for seed in range(3)]
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    objects = {stored.key: stored for stored in store.objects()}
    assert list(objects) == sorted(path.stem for path in paths)
    whole, damaged = objects[paths[0].stem], objects[paths[1].stem]
    assert (whole.text, whole.problem, whole.num_bytes) == ("text 0", None, paths[0].stat().st_size)
    assert whole.meta == make_chunk(0).meta
    assert damaged.meta is None and damaged.problem and str(paths[1]) in damaged.problem
    assert damaged.num_bytes == paths[1].stat().st_size


def test_objects_leaves_out_what_is_removed_meanwhile(store: Store) -> None:
    paths = sorted(store.put(make_chunk(seed)) for seed in range(3))
    listing = store.objects()
    assert next(listing).path == paths[0]
    paths[1].unlink()
    assert [stored.path for stored in listing] == [paths[2]]


def test_a_store_that_is_not_there_is_empty(store: Store) -> None:
    assert list(store.objects()) == []


# Where the store is


def test_the_root_is_the_argument_else_the_environment_else_dot_pic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Store().root == Path(".pic")
    monkeypatch.setenv("PIC_STORE", "elsewhere")
    assert Store().root == Path("elsewhere")
    assert Store("given").root == Path("given")


# Writes that fail


def test_a_full_disk_leaves_everything_as_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.put(make_chunk(1))
    before = path.read_bytes()

    def fill(file: BinaryIO, chunk: CompiledChunk) -> None:
        file.write(b"half an object")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module, "write_object", fill)
    for chunk in (make_chunk(1), make_chunk(2)):
        with pytest.raises(StoreError) as caught:
            store.put(chunk)
        message = str(caught.value)
        assert str(store.path(chunk.meta.key)) in message and "\n" not in message
        assert "No space left on device" in message and message.endswith("nothing was changed")
    assert files(store.root) == [path] and path.read_bytes() == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_the_last_moment_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError, match=str(store.root)):
        store.put(make_chunk(1))
    assert files(store.root) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interruption_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupt(file: BinaryIO, chunk: CompiledChunk) -> None:
        file.write(b"half an object")
        raise error

    monkeypatch.setattr(store_module, "write_object", interrupt)
    with pytest.raises(error):
        store.put(make_chunk(1))
    assert files(store.root) == []


@pytest.mark.parametrize("below", [".", "store"])
def test_a_root_that_is_or_lies_under_a_file_is_one_line(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = Store(tmp_path / "file" / below)
    with pytest.raises(StoreError) as caught:
        store.put(make_chunk(1))
    assert "\n" not in str(caught.value) and "nothing was changed" in str(caught.value)
    assert store.keys() == [] and not store.has("c" * 64)
    with pytest.raises(StoreError, match=f"^{'c' * 12}: "):
        store.open("c" * 64)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_store_is_one_line(store: Store) -> None:
    store.root.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        store.put(make_chunk(1))


def test_a_directory_in_the_way_is_one_line(store: Store) -> None:
    """One that has something in it; an empty one is replaced."""
    kept = store.path(make_chunk(1).meta.key) / "kept"
    kept.mkdir(parents=True)
    with pytest.raises(StoreError, match=f"^{kept.parent}: "):
        store.put(make_chunk(1))
    assert files(store.root) == [] and kept.exists()
    kept.rmdir()
    assert store.put(make_chunk(1)) == kept.parent and files(store.root) == [kept.parent]


# Many processes. They start from a fresh interpreter: this one has torch's threads, which a fork does not survive.

WORKERS = """
import io, json, os, random, signal, sys, time
import numpy as np
import pictool.store.store
from pictool.core import Geometry, Target
from pictool.errors import ObjectError
from pictool.store.objects.format import CompiledChunk, ObjectMeta, write_object
from pictool.store.files import locked
from pictool.store.upkeep import gc
from pictool.store.store import Store
from pictool.store.upkeep import verify

target = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(2, 2, 8))
store, task = Store(sys.argv[1]), sys.argv[2]

def chunk(seed, n=300):
    tokens = np.arange(n, dtype=np.int32) + seed
    part = np.full(16 * n, seed, dtype=np.float32).tobytes()
    meta = ObjectMeta(target.key(tokens, "none"), target, n, "none")
    return CompiledChunk(meta, f"{seed}", tokens, [(part, part)] * 2)

def spawn(work, *args):
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
            os._exit(0)
        finally:
            os._exit(1)
    return pid

def put_many(worker):
    for number in range(6):
        store.put(chunk(0))
        store.put(chunk(1 + number))
        store.put(chunk(1000 + 10 * worker + number))

def write_slowly(file, chunk):
    whole = io.BytesIO()
    write_object(whole, chunk)
    while piece := whole.getvalue()[file.tell() : file.tell() + 4096]:
        file.write(piece)
        file.flush()
        time.sleep(0.001)

def put_forever(seed):
    pictool.store.store.write_object = write_slowly  # so that most are killed in the middle of it
    while True:
        store.put(chunk(seed))
        seed += 1

def read_all():
    count = 0
    for key in store.keys():
        with store.open(key) as file:
            file.verify()
            seed = int(file.text())
            assert file.meta.key == key == chunk(seed).meta.key
            assert bytes(file.layer(1)[1]) == chunk(seed).layers[1][1]
        count += 1
    return count

def together():
    running, reads = {spawn(put_many, worker) for worker in range(8)}, 0
    failed = 0
    while running:
        reads += read_all()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.remove(pid)
            failed += status != 0
    return {"failed": failed, "reads": reads, "objects": read_all(), "temp": len(list((store.root / "tmp").iterdir()))}

def killed():
    draw, kills = random.Random(0), 0
    for round in range(12):
        pid = spawn(put_forever, 100 * round)
        time.sleep(draw.uniform(0.01, 0.1))
        os.kill(pid, signal.SIGKILL)
        kills += os.waitpid(pid, 0)[1] == signal.SIGKILL
        read_all()
    store.put(chunk(7))
    return {"kills": kills, "objects": read_all(), "listed": sum(stored.problem is None for stored in store.objects())}

def put_within_a_budget(worker):
    small = Store(sys.argv[1], 60_000)
    for number in range(20):
        small.put(chunk(20 * worker + number, 30))

def collected():
    running, most, failed = {spawn(put_within_a_budget, worker) for worker in range(8)}, 0, 0
    while running:
        if (store.root / "lock").exists():
            with locked(store.root / "lock"):
                most = max(most, sum(path.stat().st_size for path in store.root.glob("objects/??/*.kvo")))
            gc(store, 40_000)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.remove(pid)
            failed += status != 0
    damaged = len(verify(store).problems)
    temp = len(list((store.root / "tmp").iterdir()))
    return {"failed": failed + damaged, "most": most, "objects": len(store.keys()), "temp": temp}

print(json.dumps(globals()[task]()))
"""


def run_workers(store: Store, task: str) -> dict[str, int]:
    root = str(Path(store_module.__file__).parents[2])
    command = [sys.executable, "-c", WORKERS, str(store.root), task]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def test_eight_processes_put_while_others_read(store: Store) -> None:
    counts = run_workers(store, "together")
    assert counts["failed"] == 0 and counts["reads"] > 0
    assert counts["objects"] == 1 + 6 + 8 * 6 and counts["temp"] == 0


def test_a_killed_process_leaves_only_whole_objects(store: Store) -> None:
    counts = run_workers(store, "killed")
    assert counts["kills"] == 12 and counts["objects"] > 0
    assert counts["listed"] == counts["objects"]


def test_many_writers_keep_one_budget(store: Store) -> None:
    counts = run_workers(store, "collected")
    assert counts["failed"] == 0 and counts["temp"] == 0 and counts["objects"] > 0
    assert 0 < counts["most"] <= 60_000


def test_only_objects_of_a_salt_are_found_by_it(store: Store) -> None:
    """Two tenants' keys with one beginning, and a block of a chain: each tenant finds its own object alone."""
    target = make_chunk(1).meta.target
    mine: dict[str, int] = {}
    for first in range(100_000):
        mine[target.key([first, *[1] * 4], "none", "mine")[:4]] = first
        other = target.key([first, *[1] * 4], "none", "other")
        if other[:4] in mine:
            break
    prefix, firsts = other[:4], {"mine": mine[other[:4]], "other": first}
    keys = {}
    for salt, first in firsts.items():
        tokens = np.asarray([first, *[1] * 4], dtype=np.int32)
        own = target.identify(tokens, "none", salt)
        meta = replace(make_chunk(1).meta, key=own.key, salted=own.salted)
        keys[salt] = meta.key
        store.put(replace(make_chunk(1), meta=meta, tokens=tokens))
    assert {salt: store.resolve(prefix, salt) for salt in keys} == {salt: store.find(keys[salt], salt) for salt in keys}
    assert store.resolve(prefix, "mine") == keys["mine"] != keys["other"]
    with pytest.raises(StoreError, match=f"^{prefix}: "):
        store.resolve(prefix)
    for salt in ("", "third"):
        with pytest.raises(StoreError, match=f"^{prefix}: "):
            store.resolve(prefix, salt)
