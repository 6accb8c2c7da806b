"""What a link does again that another did before: it opens no file, hashes nothing and tokenizes nothing twice."""

from __future__ import annotations

import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import HEAD, LENGTHS, TAIL, make_chunks, subject

from pictool.compiler.compile import compile_chunks, object_key
from pictool.core import Chunk, CompileOptions, Text
from pictool.errors import ObjectError, StoreError
from pictool.linker.link import Linked, link
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.store import upkeep
from pictool.store.objects import format, header
from pictool.store.opened import OpenObjects
from pictool.store.store import Store

NAIVE = make_policy("naive")
DOCUMENTS = [chunk.text for chunk in make_chunks(LENGTHS)]


def spec_of(documents: list[Any]) -> Spec:
    return Spec(TAIL, documents, NAIVE, HEAD, after="none")


def texts() -> list[Text]:
    """The documents, each in a text of its own."""
    return [Text("".join(list(text)), f"document {i}") for i, text in enumerate(DOCUMENTS)]


def is_object(path: Any, *_: Any, **__: Any) -> bool:
    return str(path).endswith(".kvo")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often an object is opened, or asked for its state, and how often something is hashed."""
    counts = Counter[str]()

    def counting(module: Any, name: str, what: str, of: Callable[..., bool]) -> None:
        real = getattr(module, name)

        def run(*args: Any, **named: Any) -> Any:
            counts[what] += bool(of(*args, **named))
            return real(*args, **named)

        patch.setattr(module, name, run)

    with monkeypatch.context() as patch:
        counting(os, "open", "open", is_object)
        counting(os, "stat", "stat", is_object)
        counting(os, "lstat", "stat", is_object)
        counting(os, "fstat", "stat", lambda fd: ".kvo" in str(Path(f"/proc/self/fd/{fd}").readlink()))
        for module in (format, header):
            counting(module, "blake3", "hash", lambda *_: True)
        yield counts


@pytest.mark.parametrize("memory_bytes", [0, 1 << 26], ids=["from disk", "host memory"])
@pytest.mark.parametrize("kind", ["texts", "chunks", "files"])
def test_a_warm_link_opens_nothing_and_hashes_nothing(
    kind: str, memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = subject("llama").model, Store(tmp_path / "store", memory_bytes=memory_bytes)
    chunks = make_chunks(LENGTHS)
    done = compile_chunks(model, store, chunks)
    documents: dict[str, list[Any]] = {"texts": texts(), "chunks": chunks, "files": [each.path for each in done]}
    cold = link(model, store, spec_of(documents[kind]))
    with counted(monkeypatch) as counts:
        warm = link(model, store, spec_of(texts() if kind == "texts" else documents[kind]))
    num_objects = len(LENGTHS) + 1  # and the head
    assert not counts["open"] and not counts["hash"], counts
    assert counts["stat"] <= num_objects * (2 if kind == "files" else 1)  # a name may be a file, or a key
    require_same(cold, warm)


def require_same(one: Linked, other: Linked) -> None:
    assert one.image.logits is not None and other.image.logits is not None
    assert torch.equal(one.image.logits, other.image.logits)


class Tokenizers:
    """How often texts were tokenized."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts = list[str]()
        for name in ("_parsed", "_separated"):
            monkeypatch.setattr(model.encoder, name, partial(self._run, getattr(model.encoder, name)))

    def _run(self, run: Callable[..., Any], text: str, *more: Any) -> Any:
        self.texts.append(text)
        return run(text, *more)


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_a_text_is_tokenized_once(chunk_tokens: int | None, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(subject("llama").model)
    tokenized = Tokenizers(model, monkeypatch)
    spec = Spec(TAIL, texts(), NAIVE, HEAD, chunk_tokens=chunk_tokens)
    first = link(model, store, spec)
    count = len(tokenized.texts)
    again = link(model, store, Spec("Another question?", texts(), NAIVE, HEAD, chunk_tokens=chunk_tokens))
    assert len(tokenized.texts) == count + 1 and count > len(DOCUMENTS)
    assert [part.chunk for part in again.parts] == [part.chunk for part in first.parts]


def fresh(model: Model) -> Model:
    """The same model, whose encoder has kept nothing."""
    other = model.with_salt(model.salt)
    other._encoder = None
    return other


def test_a_note_of_a_marker_is_repeated(store: Store) -> None:
    model, notes = fresh(subject("llama").model), list[str]()
    model.on_note = notes.append
    marker = next(iter(model.encoder.control))
    for count in (1, 2):
        link(model, store, Spec(TAIL, [Text(f"A text with {marker} in it.")], NAIVE))
        assert len(notes) == count


def test_tenants_share_no_tokens(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(subject("llama").model)
    tokenized = Tokenizers(model, monkeypatch)
    link(model, store, spec_of(texts()))
    count = len(tokenized.texts)
    link(model.with_salt("other"), store, spec_of(texts()))
    assert len(tokenized.texts) == 2 * count


def test_kept_texts_are_bounded() -> None:
    encoder = fresh(subject("llama").model).encoder
    encoder.kept.max_bytes = 100
    for number in range(50):
        encoder.encode(f"a text with the number {number}")
    assert encoder.kept.num_bytes <= 100 and len(encoder.kept._values) == 3


def test_a_file_that_is_written_in_place_is_checked_again(store: Store) -> None:
    """The link is of its text, so it is compiled again."""
    model, warnings = subject("llama").model, list[str]()
    store.on_warning = warnings.append
    first = link(model, store, spec_of(texts()))
    chunk = first.documents[2][0].chunk
    path = store.path(object_key(model, chunk))
    for at in (-len(chunk.text) - 9, 20):  # in a layer, in the header
        with path.open("r+b") as file:
            data = file.read()
            file.seek(at % len(data))
            file.write(bytes([data[at % len(data)] ^ 1]))
        require_close(link(model, store, spec_of(texts())), first)
        assert len(warnings) >= 1
        warnings.clear()


def require_close(one: Linked, other: Linked) -> None:
    assert one.image.logits is not None and other.image.logits is not None
    torch.testing.assert_close(one.image.logits, other.image.logits, rtol=0, atol=1e-4)


def test_another_tenant_gets_no_open_object(store: Store) -> None:
    model = subject("llama").model
    link(model.with_salt("one"), store, spec_of(texts()))
    (chunk, *_) = make_chunks(LENGTHS)
    with pytest.raises(StoreError):
        link(model, store, spec_of([object_key(model.with_salt("one"), chunk)]))


def compiled(store: Store) -> list[str]:
    return [done.key for done in compile_chunks(subject("llama").model, store, make_chunks((29, 17, 21)))]


def open_paths() -> set[str]:
    return {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


def test_an_object_stays_open_until_it_is_removed(store: Store) -> None:
    first, second, third = compiled(store)
    for key in (first, second, third):
        with store.open(key) as file:
            file.layer(0)
        assert str(store.path(key)) in open_paths()
    del file
    assert store.open(first) is store.open(first)
    upkeep.gc(store, max_bytes=store.path(first).stat().st_size)  # it was used last
    assert [str(store.path(key)) in open_paths() for key in (first, second, third)] == [True, False, False]
    upkeep.expire(store, [first])
    assert not any("(deleted)" in path and str(store.root) in path for path in open_paths())


def test_an_object_that_was_replaced_is_opened_again(store: Store) -> None:
    key = compiled(store)[0]
    before = store.open(key)
    before.layer(0)
    compile_chunks(subject("llama").model, store, make_chunks((29, 17, 21)), force=True)
    after = store.open(key)
    assert after is not before and bytes(after.layer(0)[0]) == bytes(before.layer(0)[0])


def test_use_is_noted(store: Store) -> None:
    """The mtime is when an object was last used, however often it was before."""
    first, second, _ = compiled(store)
    for key, other in ((first, second), (second, first)) * 2:
        store.open(key)
        assert store.path(key).stat().st_mtime_ns > store.path(other).stat().st_mtime_ns


def test_no_more_stay_open_than_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    few = OpenObjects()
    few._most = 2
    monkeypatch.setattr("pictool.store.store.opened", few)
    for key in compiled(store):
        store.open(key).close()
    assert len(few._files) == 2 and len([path for path in open_paths() if str(store.root) in path]) == 2


def test_a_reader_keeps_its_object_when_others_take_its_place(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    few = OpenObjects()
    few._most = 1
    monkeypatch.setattr("pictool.store.store.opened", few)
    first, second, _ = compiled(store)
    with store.open(first) as file:
        store.open(second)
        assert file.layer(0)


def test_threads_and_forks_read_the_same_objects(store: Store) -> None:
    keys, wrong = compiled(store), list[BaseException]()
    own = {key: bytes(store.open(key).layer(1)[0]) for key in keys}

    def work() -> None:
        try:
            for key in keys * 30:
                with store.open(key) as file:
                    assert bytes(file.layer(1)[0]) == own[key]
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if not child:
        work()
        os._exit(len(wrong))
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0 and not wrong


def test_verifying_reads_all_again(store: Store) -> None:
    """Of what links use, too, and where times are as they were."""
    (key, *_) = compiled(store)
    with store.open(key) as file:
        for layer in range(file.meta.target.geometry.layers):
            file.layer(layer)
        path, status = store.path(key), store.path(key).stat()
        data = bytearray(path.read_bytes())
        data[len(data) * 8 // 10] ^= 1  # of a layer
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(ObjectError):
            file.verify()
    assert upkeep.verify(store).problems.keys() == {key}


def test_a_chunk_is_pickled_without_what_was_made_of_it(store: Store) -> None:
    (chunk, *_) = make_chunks(LENGTHS)
    before = pickle.dumps(chunk)
    assert object_key(subject("llama").model, chunk, CompileOptions()) and chunk.ids.tolist() == list(chunk.tokens)
    assert pickle.dumps(chunk) == before
    copied: Chunk = pickle.loads(before)
    assert copied == chunk and not copied.keys
