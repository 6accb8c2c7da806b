"""The pipelined loader: look-ahead, overlap, errors. No clocks: threads wait for one another, with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import compile, link
from subjects import HEAD, LENGTHS, TAIL, make_chunks, run, subject

from pictool.compiler.compile import Compiled
from pictool.core import Layout
from pictool.errors import ObjectError, StoreError
from pictool.linker.loader import PREFETCHED_LAYERS, Loader, Loads, PlacedObject
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Needs, Policy, Prompt, Selection, no_rows
from pictool.runtime.memory.image import Image
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

LIMIT = 60  # seconds after which a wait has failed


class Spy:
    """Which layers were read, in which order; reading one can be held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self._changed, self._read = threading.Condition(), ObjectFile.layer
        spy = self

        def layer(file: ObjectFile, index: int, into: memoryview | None = None) -> Any:
            if index in spy.gates:
                assert spy.gates[index].wait(LIMIT)
            found = spy._read(file, index, into)
            with spy._changed:
                spy.layers.append(index)
                spy._changed.notify_all()
            return found

        monkeypatch.setattr(ObjectFile, "layer", layer)

    def wait_for(self, count: int) -> list[int]:
        """The layers that were read, as soon as there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.layers) >= count, LIMIT)
            return sorted(self.layers)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture
def loader(store: Store, spy: Spy) -> Iterator[Loader]:
    model, (chunk,) = subject("llama").model, make_chunks((29,))
    (done,) = compile(model, store, [chunk])
    image = Image(model.stack, Layout.of([], [chunk.tokens], [5]))
    with Loader(Loads(image, [PlacedObject(ObjectFile(done.path), 0)]), overlaps=True) as loader:
        yield loader


def test_look_ahead_is_bounded(loader: Loader, spy: Spy) -> None:
    assert spy.wait_for(count=PREFETCHED_LAYERS) == [0, 1]
    loader._threads.submit(lambda: None).result(LIMIT)  # the queue is empty: nothing else was asked for
    assert spy.layers.count(2) == 0
    loader.synchronize(0)
    assert spy.wait_for(count=3) == [0, 1, 2]


def test_a_layer_is_waited_for_alone(loader: Loader, spy: Spy) -> None:
    spy.wait_for(count=2)
    spy.gates[2] = threading.Event()
    loader.synchronize(0)
    loader.synchronize(1)  # while 2 is held up
    spy.gates[2].set()
    assert loader.synchronize(2) >= 0
    assert loader.busy_s > 0


@pytest.mark.parametrize(("seconds", "patience_s"), [(0.0, LIMIT), (0.01, 0.002)], ids=["at hand", "slow"])
def test_a_thread_loads_once_storage_was_waited_for(
    seconds: float, patience_s: float, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it would take the cores that compute; it takes one of them, whatever torch is allowed."""
    loads: list[tuple[bool, int]] = []
    read, num_threads = ObjectFile.layer, torch.get_num_threads()

    def layer(file: ObjectFile, index: int, into: memoryview | None = None) -> Any:
        loads.append((threading.current_thread().name.startswith("pic-loader"), torch.get_num_threads()))
        time.sleep(seconds)
        return read(file, index, into)

    monkeypatch.setattr(ObjectFile, "layer", layer)
    monkeypatch.setattr("pictool.linker.loader.PATIENCE_S", patience_s)
    torch.set_num_threads(2)
    try:
        run(subject("llama"), store, make_policy("naive", {}), make_chunks((29,)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    own, of_thread = (False, 2), (True, 1)
    assert set(loads) == ({own, of_thread} if seconds else {own})


class Scoring(Policy):
    """Selects as slowly as a speculative model would: only after the first layers were read."""

    name = "scoring-test"  # type: ignore[misc]
    spy: Spy

    @property
    def needs(self) -> Needs:
        return Needs(runs_model=True)

    def select(self, prompt: Prompt) -> Selection:
        Scoring.spy.wait_for(count=PREFETCHED_LAYERS)
        return Selection(no_rows(prompt.layout))


def test_slow_selection_overlaps_the_first_layers_load(store: Store, spy: Spy) -> None:
    Scoring.spy = spy
    one, chunks = subject("llama"), make_chunks((29,))
    linked = link(one.model, store, chunks, TAIL, Scoring())
    naive = link(one.model, store, chunks, TAIL, make_policy("naive", {}))
    assert torch.equal(linked.image.logits, naive.image.logits)  # type: ignore[arg-type]


def test_layers_that_are_computed_in_full_are_not_read(store: Store, spy: Spy) -> None:
    run(subject("llama"), store, make_policy("cacheblend", {"filter": "single"}), make_chunks((29,)))
    assert set(spy.layers) == {1, 2}
    spy.layers.clear()
    run(subject("llama"), store, make_policy("cacheblend", {"ratio": 1}), make_chunks((29,)))
    assert not spy.layers


def open_files() -> list[str]:
    """What this process has open but objects, which stay open."""
    files = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sorted(file for file in files if ".kvo" not in file and "/proc/" not in file)


def test_damage_in_a_later_layer_ends_the_link_and_closes_all(store: Store) -> None:
    """Of an object that was named as a file, so that there is no text to compile in its place."""
    one, chunks = subject("llama"), make_chunks(LENGTHS)
    done = compile(one.model, store, chunks)
    whole = done[2].path.read_bytes()
    at = len(whole) * 9 // 10  # in the last layer
    done[2].path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    before = open_files()
    with pytest.raises(ObjectError, match=f"^{done[2].path}: layer 2 "):
        run(one, store, make_policy("naive", {}), [entry.path for entry in done])
    assert open_files() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pic-loader")]


@pytest.mark.parametrize("policy", ["naive", "legolink", "cacheblend"])
@pytest.mark.parametrize("how", ["removed", "header damaged"])
def test_a_missing_object_in_the_middle_is_compiled_in_place(policy: str, how: str, store: Store) -> None:
    """It is stored again, the later chunks are reused, and the answer is the same."""
    one, chunks = subject("llama"), make_chunks((29, 17, 21))
    first = run(one, store, make_policy(policy, {}), chunks)
    middle = store.path(compile(one.model, store, [chunks[1]])[0].key)
    whole, others = middle.read_bytes(), {path: path.stat().st_ino for path in objects(store) if path != middle}
    if how == "removed":
        middle.unlink()
    else:
        middle.write_bytes(whole[:20] + b"?" + whole[21:])
    told: list[Compiled] = []
    again = link(one.model, store, chunks, TAIL, make_policy(policy, {}), head=HEAD, on_compile=told.append)
    assert [done.chunk for done in told] == [chunks[1]]
    assert ObjectFile(middle).meta.num_tokens == 17
    assert others == {path: path.stat().st_ino for path in objects(store) if path != middle}
    assert float((again.image.logits - first.image.logits).abs().max()) <= 1e-4  # type: ignore[operator]
    assert (again.rows == first.rows).all()


def objects(store: Store) -> list[Path]:
    return [store.path(key) for key in store.keys()]


@pytest.mark.parametrize(("algo", "is_any"), [("naive", True), ("cacheblend", True), ("full", False)])
def test_bytes_read_are_those_that_were_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, algo: str, is_any: bool
) -> None:
    read: list[int] = []
    layer = ObjectFile.layer

    def spied(file: ObjectFile, index: int, into: memoryview | None = None) -> Any:
        found = layer(file, index, into)
        read.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(ObjectFile, "layer", spied)
    linked = run(subject("llama"), store, make_policy(algo, {}), make_chunks(LENGTHS))
    assert linked.bytes_read == sum(read)
    assert (sum(read) > 0) == is_any


def test_an_object_that_is_evicted_before_it_is_opened_is_compiled_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, chunks = subject("llama"), make_chunks((29, 17))
    wanted = run(one, Store(tmp_path / "other"), make_policy("naive", {}), chunks)
    peek, evicted = Store.peek, list[str]()

    def evicting(self: Store, key: str) -> ObjectFile:
        if self.path(key).exists() and evicted.count(key) < 2:
            evicted.append(key)
            self.path(key).unlink()
        return peek(self, key)

    monkeypatch.setattr(Store, "peek", evicting)
    linked = run(one, store, make_policy("naive", {}), chunks)
    assert len(evicted) == 6  # head and two chunks, each twice
    assert float((linked.image.logits - wanted.image.logits).abs().max()) <= 1e-5  # type: ignore[operator]
    evicted.clear()
    monkeypatch.setattr(Store, "peek", lambda self, key: peek(self, "0" * 64))
    with pytest.raises(StoreError, match=str(store.root)):
        run(one, store, make_policy("naive", {}), chunks)
