"""Layers in host memory: what stays, what goes, and what threads see."""

from __future__ import annotations

import threading

import pytest

from pictool.errors import ObjectError
from pictool.store.memory import LayerMemory


class Source:
    """Gives buffers of 10 bytes, and counts."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def get(self, memory: LayerMemory, name: str, num_bytes: int = 10) -> bytes:
        def read() -> bytes:
            self.reads.append(name)
            return name.encode() * num_bytes

        buffer: bytes = memory.get(name, num_bytes, read)
        return buffer


def test_a_buffer_is_read_once() -> None:
    memory, source = LayerMemory(30), Source()
    assert source.get(memory, "a") is source.get(memory, "a") and source.reads == ["a"]
    assert (memory.hits, memory.misses, memory.num_bytes) == (1, 1, 10)


def test_what_was_used_least_recently_goes() -> None:
    memory, source = LayerMemory(30), Source()
    for name in ("a", "b", "c", "a", "d", "a", "c", "b"):
        source.get(memory, name)
    assert source.reads == ["a", "b", "c", "d", "b"] and memory.num_bytes == 30


@pytest.mark.parametrize("max_bytes", [0, 9])
def test_what_does_not_fit_is_not_kept(max_bytes: int) -> None:
    memory, source = LayerMemory(max_bytes), Source()
    assert source.get(memory, "a") == source.get(memory, "a") and len(source.reads) == 2 and not memory.num_bytes


def test_a_large_one_displaces_many_but_never_exceeds() -> None:
    memory, source = LayerMemory(30), Source()
    for name in "abc":
        source.get(memory, name)
    source.get(memory, "d", 25)
    assert memory.num_bytes == 25


def test_what_cannot_be_read_is_not_kept() -> None:
    memory, source = LayerMemory(30), Source()

    def fail() -> bytes:
        raise ObjectError("damaged")

    with pytest.raises(ObjectError):
        memory.get("a", 10, fail)
    assert source.get(memory, "a") == b"a" * 10


def test_threads_see_whole_buffers_and_the_bound_holds() -> None:
    memory, wrong = LayerMemory(55), list[object]()

    def work(seed: int) -> None:
        source = Source()
        for step in range(2000):
            name = chr(97 + (seed * 7 + step * step) % 11)
            if source.get(memory, name) != name.encode() * 10 or memory.num_bytes > 55:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and memory.hits + memory.misses == 16000
    assert memory.num_bytes == 10 * len(memory._values)
