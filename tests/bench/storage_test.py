"""Rates of storage: what is written and read, what the rates are made of, and that nothing is left behind."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pictool.bench import storage
from pictool.bench.storage import COMPARED_WITH, ObjectSize, StorageResult, bench_storage, bytes_needed, size_of_mb
from pictool.core import Geometry
from pictool.errors import InputError
from pictool.store.objects.format import CompiledChunk, ObjectFile
from pictool.store.store import Store

TINY = Geometry(layers=3, kv_heads=2, head_dim=8)
SMALL = ObjectSize(tokens=5, count=2, geometry=TINY)
ALWAYS = {"write", "disk_write", "read_cold", "disk_cold", "read_warm", "copy", "verify", "checksum"}


def measure(*sizes: ObjectSize, **more: Any) -> list[StorageResult]:
    return bench_storage(sizes, memory_bytes=1 << 16, **more)


def test_sizes_are_those_of_k_and_v() -> None:
    # 2 (K, V) · 2 heads · 5 tokens · 8 dims · 2 bytes; three layers.
    assert SMALL.layer_bytes == 320 and SMALL.kv_bytes == 960
    assert ObjectSize(5, 2, TINY, "float32").kv_bytes == 1920
    # Llama-3.1-8B in bfloat16: 2 · 32 · 8 · 128 · 2 bytes a token.
    assert size_of_mb(16).tokens == round(16e6 / 131072)
    assert size_of_mb(1e-9).tokens == 1


def test_every_operation_is_timed_in_every_repeat_and_nothing_stays(tmp_path: Path) -> None:
    steps: list[None] = []
    results = measure(SMALL, ObjectSize(9, 1, TINY), repeats=3, on_step=lambda: steps.append(None))
    assert [result.size.tokens for result in results] == [5, 9] and len(steps) == 6
    for result in results:
        assert set(result.seconds) - {"disk_direct"} == ALWAYS
        assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in result.seconds.values())
        assert result.file_bytes > result.size.kv_bytes
    assert list(tmp_path.iterdir()) == []


def test_rates_are_bytes_of_k_and_v_by_time_and_shares_those_of_the_same_repeat() -> None:
    seconds = {
        "write": [2.0, 4.0], "disk_write": [1.0, 1.0], "read_cold": [2.0, 2.0], "disk_cold": [4.0, 1.0],
        "disk_direct": [1.0, 2.0], "read_warm": [1.0, 1.0], "copy": [0.5, 0.5], "verify": [3.0, 3.0],
        "checksum": [1.0, 1.5],
    }  # fmt: skip
    result = StorageResult(ObjectSize(5, 2, TINY), 1, True, seconds)
    gb = 2 * 960 / 1e9  # of a repeat
    assert result.rates("write") == pytest.approx([gb / 2, gb / 4])
    assert result.compared_rates("read_cold") == pytest.approx([gb, gb])  # the faster way past or through the cache
    assert result.share("write", result.compared_rates("write")) == pytest.approx((1 / 2 + 1 / 4) / 2)
    # Written after the checksum is known: 1 + 1 and 1 + 1.5 s. Read: 0.5 + 1 and 0.5 + 1.5 s, or the disk's 1 s.
    assert result.expected_rates("write") == pytest.approx([gb / 2, gb / 2.5])
    assert result.expected_rates("read_warm") == result.expected_rates("verify") == pytest.approx([gb / 1.5, gb / 2])
    assert result.expected_rates("read_cold") == pytest.approx([gb / 1.5, gb / 2])
    report = result.report()
    assert report["operations"]["write"]["of_own"] == pytest.approx(0.375)
    assert report["operations"]["write"]["of_expected"] == pytest.approx((1 + 2.5 / 4) / 2)
    assert set(report["operations"]) == set(COMPARED_WITH) and report["raw_s"] == seconds


def test_objects_are_whole_and_hold_what_was_drawn(tmp_path: Path) -> None:
    store, data = Store(tmp_path), storage._draw_numbers(SMALL, np.random.default_rng(0))
    path = store.put(storage._object(SMALL, data, np.random.default_rng(1)))
    with ObjectFile(path) as file:
        file.verify()
        assert file.meta.target.geometry == TINY and file.meta.num_tokens == 5
        assert b"".join(bytes(part) for layer in range(3) for part in file.layer(layer)) == data


def test_all_layers_of_all_objects_are_read_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    layer = ObjectFile.layer

    def counted(file: ObjectFile, index: int, into: memoryview | None = None) -> tuple[memoryview, ...]:
        read.append(index)
        assert into is None or len(into) == file.layer_bytes
        return layer(file, index, into)

    monkeypatch.setattr(ObjectFile, "layer", counted)
    measure(SMALL, repeats=1)
    assert read == [0, 1, 2] * 2 * 2  # two objects: cold, warm


def test_memory_is_passed_over_layer_by_layer_and_over_and_over() -> None:
    memory = np.arange(1000, dtype=np.int64).astype(np.uint8)
    pieces = list(storage._pieces(SMALL, memory))  # 2 · 3 layers of 320 bytes; three fit
    assert [len(piece) for piece in pieces] == [320] * 6
    assert [int(piece[0]) for piece in pieces] == [0, 320 % 256, 640 % 256] * 2


def test_what_is_compared_changes_places(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    put = Store.put

    def put_object(store: Store, chunk: CompiledChunk) -> Path:
        order.append("object")
        return put(store, chunk)

    def put_plain(path: Path, data: memoryview) -> None:
        order.append("plain")
        path.write_bytes(data)

    monkeypatch.setattr(Store, "put", put_object)
    monkeypatch.setattr(storage, "write_file", put_plain)
    measure(ObjectSize(1, 1, TINY), repeats=2)
    assert order == ["object", "plain", "plain", "object"]


def test_interrupted_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        assert any(tmp_path.rglob("*.kvo"))
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "_read_objects", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(SMALL, repeats=1)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_known_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = bytes_needed(SMALL) - 1
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**12, 10**12 - free, free))
    with pytest.raises(InputError, match=r"are free.*--store"):
        measure(SMALL)
    assert list(tmp_path.iterdir()) == []


def test_as_much_as_is_asked_for_is_written_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, found = ObjectSize(300, 3, Geometry(40, 4, 8)), []
    read = storage._read_objects

    def record(*arguments: Any) -> None:
        found.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
        read(*arguments)

    monkeypatch.setattr(storage, "_read_objects", record)
    measure(size, repeats=1)
    assert 2 * size.count * size.kv_bytes < max(found) <= bytes_needed(size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: size_of_mb(0), "--mb 0"),
        (lambda: size_of_mb(float("inf")), "--mb inf"),
        (lambda: ObjectSize(0), "tokens 0"),
        (lambda: ObjectSize(1, 0), "objects 0"),
        (lambda: ObjectSize(1, 1, Geometry(0, 1, 1)), "layers 0"),
        (lambda: ObjectSize(1, dtype="int8"), "dtype int8"),
        (lambda: measure(SMALL, repeats=0), "--repeats 0"),
        (lambda: measure(SMALL, parent="nowhere"), "nowhere: no such directory"),
    ],
)
def test_what_makes_no_sense(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_without_direct_reads_the_disk_is_what_comes_through_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "read_direct", lambda _: None)
    (result,) = measure(SMALL, repeats=1)
    assert set(result.seconds) == ALWAYS
    assert result.compared_rates("read_cold") == result.rates("disk_cold")


@pytest.mark.parametrize(("held", "want"), [(True, False), (False, True), (None, None)])
def test_it_says_whether_the_page_cache_drops_files(
    held: bool | None, want: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "is_cached", lambda _: held)
    (result,) = measure(SMALL, repeats=1)
    assert result.is_cold is want


def test_sizes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = storage.run_repeat

    def run(size: ObjectSize, *more: Any) -> storage.StorageRepeat:
        seen.append(size.tokens)
        return original(size, *more)

    monkeypatch.setattr(storage, "run_repeat", run)
    measure(*(ObjectSize(tokens, 1, TINY) for tokens in (1, 2, 3)), repeats=2)
    assert seen == [1, 2, 3, 2, 3, 1]
