"""Links from every tier: host memory, local disk, a remote. The same numbers, or a refusal; never others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from alone import compile, link
from chunks import content, flip
from served import Server
from subjects import HEAD, LENGTHS, TAIL, default_policy, make_chunks, run, subject

from pictool.compiler.compile import object_key
from pictool.core import Chunk
from pictool.errors import ObjectError, StoreError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy, policies
from pictool.runtime.model import wrap_model
from pictool.store.codecs import codecs
from pictool.store.objects.format import CompiledChunk
from pictool.store.remote.remote import Remote
from pictool.store.store import Store
from pictool.store.upkeep import verify

NAIVE = make_policy("naive", {})
CODECS = sorted(codecs())
LINKING = sorted(name for name, policy in policies().items() if not policy().needs.chain_block)  # what links objects


@pytest.fixture
def far(tmp_path: Path) -> Store:
    """A store with the objects of all chunks and of the head."""
    far, one = alone(tmp_path / "far", make_chunks(LENGTHS)), subject("llama")
    link(one.model, far, make_chunks(LENGTHS), TAIL, NAIVE, head=HEAD)
    return far


def alone(root: Path, chunks: Sequence[Chunk], codec: str = "none") -> Store:
    """A store with objects that were compiled one by one: the last bits depend on what is compiled together."""
    compile(subject("llama").model, Store(root), chunks, codec=codec, alone=True)
    return Store(root)


def require_equal(one: Linked, other: Linked) -> None:
    """Bit for bit, whole images and logits."""
    require_close(one, other, limit=0)


def require_close(one: Linked, other: Linked, limit: float = 1e-5) -> None:
    """The same but for the order of sums, of objects that were compiled beside others."""
    assert one.image.logits is not None and other.image.logits is not None
    torch.testing.assert_close(one.image.logits, other.image.logits, rtol=0, atol=limit)
    for layer in range(one.image.stack.num_layers):
        torch.testing.assert_close(one.image.key(layer), other.image.key(layer), rtol=0, atol=limit)
        torch.testing.assert_close(one.image.value(layer), other.image.value(layer), rtol=0, atol=limit)


def linked(store: Store, documents: Sequence[Chunk | str | Path], codec: str = "none") -> tuple[Linked, list[str]]:
    """A link without recomputation, and the chunks that were compiled for it."""
    compiled: list[str] = []
    done = link(
        subject("llama").model, store, documents, TAIL, NAIVE, head=HEAD, codec=codec,
        on_compile=lambda one: compiled.append(one.key),
    )  # fmt: skip
    return done, compiled


# The remote


@pytest.mark.parametrize("name", LINKING)
def test_a_link_from_a_remote_is_one_from_disk(name: str, far: Store, near: Store, warnings: list[str]) -> None:
    one, policy, chunks = subject("llama"), default_policy(name), make_chunks(LENGTHS)
    local = run(one, far, policy, chunks)  # compiles what this policy needs beside
    first, second = run(one, near, policy, chunks), run(one, near, policy, chunks)
    near.drain()
    third = run(one, near, policy, chunks)
    for remote in (first, second, third):
        require_equal(local, remote)
    assert not warnings and set(near.keys()) <= set(far.keys())


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_comes_from_a_remote(codec: str, far: Store, near: Store) -> None:
    local, _ = linked(far, make_chunks(LENGTHS), codec)
    remote, compiled = linked(near, make_chunks(LENGTHS), codec)
    require_equal(local, remote)
    assert not compiled


def test_keys_come_from_a_remote(far: Store, near: Store) -> None:
    keys = [object_key(subject("llama").model, chunk) for chunk in make_chunks(LENGTHS)]
    require_equal(linked(far, keys)[0], linked(near, keys)[0])


def test_compile_takes_what_the_remote_has(far: Store, near: Store) -> None:
    done = compile(subject("llama").model, near, [*make_chunks(LENGTHS), *make_chunks((7,), seed=3)])
    assert [one.is_new for one in done] == [False] * len(LENGTHS) + [True]
    for one in done[:-1]:
        assert one.path.read_bytes() == far.path(one.key).read_bytes()


@pytest.mark.parametrize("offset", [40, -3000, -600, -2])
def test_text_whose_object_is_damaged_there_is_compiled_here(
    offset: int, far: Store, near: Store, warnings: list[str]
) -> None:
    (key,) = {object_key(subject("llama").model, chunk) for chunk in make_chunks((29,))}
    flip(far.path(key), offset)
    fresh, _ = linked(alone(near.root.parent / "fresh", make_chunks(LENGTHS)), make_chunks(LENGTHS))
    done, compiled = linked(near, make_chunks(LENGTHS))
    require_equal(fresh, done)
    near.drain()
    assert len(warnings) == 1 and f"{near.remote}/objects/{key[:2]}/{key}.kvo: " in warnings[0]
    if offset == -2:  # in the text, which no link reads
        assert not compiled and key not in near.keys() and "not added to the store" in warnings[0]
    else:
        assert compiled == [key] and "compiled here" in warnings[0]
        with near.peek_local(key) as file:
            file.verify()


@pytest.mark.parametrize("fault", ["503", "403", "reset", "wrong"])
def test_text_whose_object_cannot_be_had_is_compiled_here(
    fault: str, near: Store, server: Server, warnings: list[str]
) -> None:
    fresh, _ = linked(Store(near.root.parent / "fresh"), make_chunks(LENGTHS))
    server.always = fault
    done, compiled = linked(near, make_chunks(LENGTHS))
    require_equal(fresh, done)
    assert len(compiled) == len(warnings) == len({*LENGTHS}) + 1
    assert all(str(near.remote) in warning for warning in warnings)


def test_keys_whose_object_is_damaged_there_are_refused(far: Store, near: Store, warnings: list[str]) -> None:
    key = object_key(subject("llama").model, make_chunks((29,))[0])
    flip(far.path(key), -600)
    with pytest.raises(StoreError, match=f"^{near.remote}/objects/.*{key}.kvo: "):
        linked(near, [key])
    assert key not in near.keys() and not warnings


# Host memory


def checksums(store: Store) -> list[bytes]:
    assert store.memory
    return [bytes(buffer.numpy()) for buffer, _ in store.memory._values.values()]


@pytest.mark.parametrize("name", LINKING)
def test_links_from_memory_are_equal_and_write_nothing_to_it(name: str, tmp_path: Path) -> None:
    one, policy, chunks = subject("llama"), default_policy(name), make_chunks(LENGTHS)
    plain, store = Store(tmp_path / "store"), Store(tmp_path / "store", memory_bytes=1 << 24)
    expected = run(one, plain, policy, chunks)
    require_equal(expected, run(one, store, policy, chunks))
    before = checksums(store)
    again = run(one, store, policy, [chunks[2], *chunks])
    require_equal(run(one, plain, policy, [chunks[2], *chunks]), again)
    require_equal(expected, last := run(one, store, policy, chunks))
    assert checksums(store)[: len(before)] == before
    assert last.bytes_read == 0
    if policy.name != "full":
        assert expected.bytes_read > 0


@pytest.mark.parametrize("codec", CODECS)
def test_memory_holds_decoded_layers_of_every_codec(codec: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store", memory_bytes=1 << 24)
    expected, _ = linked(Store(tmp_path / "store"), make_chunks(LENGTHS), codec)
    first, _ = linked(store, make_chunks(LENGTHS), codec)
    second, _ = linked(store, make_chunks(LENGTHS), codec)
    require_equal(expected, first)
    require_equal(expected, second)
    assert second.bytes_read == 0 < first.bytes_read <= expected.bytes_read  # one document stands there twice


def test_a_document_that_stands_twice_is_read_once(tmp_path: Path) -> None:
    chunk = make_chunks((29,))
    once, _ = linked(Store(tmp_path / "store", memory_bytes=1 << 24), chunk)
    twice, _ = linked(Store(tmp_path / "store", memory_bytes=1 << 24), chunk * 2)
    assert twice.bytes_read == once.bytes_read


def test_memory_that_is_too_small_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", memory_bytes=5000)
    expected, _ = linked(Store(tmp_path / "store"), make_chunks(LENGTHS))
    for _ in range(3):
        require_equal(expected, linked(store, make_chunks(LENGTHS))[0])
        assert store.memory and store.memory.num_bytes <= 5000


def test_a_file_that_changes_is_not_served_from_memory(tmp_path: Path) -> None:
    """Another model's numbers under the same name: what the header says decides, not the name."""
    one, other, chunks = subject("llama"), subject("llama-linear"), make_chunks((29,))
    store = Store(tmp_path / "store", memory_bytes=1 << 24)
    mine = compile(one.model, store, chunks)[0].path
    linked(store, chunks)
    theirs = compile(other.model, store, chunks)[0].path
    mine.write_bytes(theirs.read_bytes())
    with pytest.raises(ObjectError):
        linked(store, [mine])
    flip(mine, 50)
    done, compiled = linked(store, chunks)  # its header is damaged: it is compiled again
    assert compiled
    require_equal(linked(alone(tmp_path / "fresh", chunks), chunks)[0], done)


def test_damage_on_disk_is_still_met_where_memory_has_nothing(tmp_path: Path) -> None:
    store, chunks = Store(tmp_path / "store", memory_bytes=1 << 24), make_chunks((29,))
    (done,) = compile(subject("llama").model, store, chunks)
    flip(done.path, -600)
    with pytest.raises(ObjectError, match=f"^{done.path}: "):
        linked(store, [done.path])
    assert store.memory and all(len(one) for one in checksums(store))


# What is damaged, or another object than its name says, is compiled again where its text is at hand


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_layer_is_compiled_again(codec: str, tmp_path: Path, warnings: list[str]) -> None:
    alone(tmp_path / "store", make_chunks(LENGTHS), codec)
    store, chunks = Store(tmp_path / "store", on_warning=warnings.append), make_chunks(LENGTHS)
    expected, _ = linked(store, chunks, codec)
    whole, key = content(store), subject("llama").model.key(chunks[1].tokens, codec)
    flip(store.path(key), -60)
    done, compiled = linked(store, chunks, codec)
    require_equal(expected, done)
    assert compiled == [key] and content(store) == whole
    (warning,) = warnings
    assert "does not match its checksum" in warning and str(store.path(key)) in warning


def test_every_damaged_object_of_a_link_is_compiled_again(tmp_path: Path, warnings: list[str]) -> None:
    store, chunks = Store(tmp_path / "store", on_warning=warnings.append), make_chunks(LENGTHS)
    expected, _ = linked(store, chunks)
    for key in store.keys():
        flip(store.path(key), -600)
    done, compiled = linked(store, chunks)
    require_close(expected, done)
    assert sorted(compiled) == store.keys() and len(warnings) == len(compiled)


@pytest.mark.parametrize("offset", [40, -600, -2])
def test_compile_does_not_call_a_damaged_object_cached(offset: int, tmp_path: Path, warnings: list[str]) -> None:
    model, store = subject("llama").model, Store(tmp_path / "store", on_warning=warnings.append)
    chunks = make_chunks(LENGTHS)
    first = compile(model, store, chunks, alone=True)
    whole = content(store)
    flip(first[1].path, offset)
    assert [one.is_new for one in compile(model, store, chunks)] == [one.key == first[1].key for one in first]
    assert content(store) == whole and len(warnings) == 1 and str(first[1].path) in warnings[0]


def put_forged(store: Store, length: int) -> str:
    """Under the key of a document, another document's object, of which all checksums hold."""
    model, (chunk,), (other,) = subject("llama").model, make_chunks((length,), seed=5), make_chunks((length,), seed=6)
    key, (done,) = object_key(model, chunk), compile(model, store, [other])
    with store.peek_local(done.key) as file:
        layers = [tuple(bytes(part) for part in file.layer(layer)) for layer in range(model.geometry.layers)]
        meta = replace(file.meta, key=key)
        forged = CompiledChunk(meta, file.text(), file.tokens(), [(key, value) for key, value in layers])
    store.put(forged)
    return key


@pytest.mark.parametrize("by", ["link", "compile", "key"])
def test_another_document_under_the_right_key_is_never_taken(
    by: str, far: Store, near: Store, warnings: list[str]
) -> None:
    key, chunk = put_forged(far, 31), make_chunks((31,), seed=5)[0]
    fresh, _ = linked(alone(near.root.parent / "fresh", [chunk]), [chunk])
    if by == "key":
        with pytest.raises(StoreError, match=f"^{near.remote}/objects/.*{key}.kvo: .*{key[:12]} "):
            linked(near, [key])
        assert key not in near.keys()
        return
    if by == "compile":
        (compiled,) = compile(subject("llama").model, near, [chunk])
        assert compiled.is_new
    done, _ = linked(near, [chunk])
    require_equal(fresh, done)
    near.drain()
    assert f"{near.remote}/objects/{key[:2]}/{key}.kvo: its key {key[:12]}" in warnings[0]
    assert len(warnings) == 1 and not verify(near).problems


def test_another_document_under_the_right_key_here_is_compiled_again(tmp_path: Path, warnings: list[str]) -> None:
    store, chunk = Store(tmp_path / "store", on_warning=warnings.append), make_chunks((31,), seed=5)[0]
    fresh, _ = linked(Store(tmp_path / "fresh"), [chunk])
    key = put_forged(store, 31)
    assert list(verify(store).problems) == [key]
    done, compiled = linked(store, [chunk])
    require_equal(fresh, done)
    assert key in compiled and "its content" in warnings[0] and not verify(store).problems
    put_forged(store, 31)
    assert verify(store, repair=True).repaired == (key,) and not verify(store).problems


def test_keys_with_a_salt_are_recomputed_without_it(tmp_path: Path) -> None:
    one, store = subject("llama").model, Store(tmp_path / "store")
    for salt in ("mine", "yours"):
        compile(wrap_model(one.module, one.tokenizer, one.name, salt), store, make_chunks(LENGTHS))
    assert len(store.keys()) == 2 * len({*LENGTHS}) and not verify(store).problems
    remote = Remote(str(store.root))
    for key in store.keys():
        assert Store(tmp_path / "near", remote=remote).fetch(key)


def test_threads_share_memory_and_a_remote(far: Store, server: Server, tmp_path: Path) -> None:
    near = Store(tmp_path / "near", remote=server.remote, memory_bytes=40_000)
    expected, _ = linked(far, make_chunks(LENGTHS))
    found, failed = [], list[BaseException]()

    def work() -> None:
        try:
            found.append(linked(near, make_chunks(LENGTHS))[0])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 8
    for one in found:
        require_equal(expected, one)
    assert len(server.asked) == len({*server.asked})


def test_prefix_chains_are_of_the_local_store(far: Store, near: Store, server: Server) -> None:
    one, policy, chunks = subject("llama"), make_policy("prefix", {"block": 4}), make_chunks(LENGTHS)
    wanted = [run(one, far, policy, chunks) for _ in range(2)]
    assert not server.asked
    found = [run(one, near, policy, chunks) for _ in range(2)]
    for mine, theirs in zip(found, wanted, strict=True):
        require_equal(mine, theirs)
    assert not server.asked
