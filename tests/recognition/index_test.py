"""Stored documents recognised in prompts, whatever surrounds them; and an index that follows its store.

The table of tokenizers × layouts is the specification of what is recognised. Both are made here: tokenizers of the
kinds that large models have, trained on the sample corpus, and prompts as applications write them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import small_tokenizers
from chunks import TARGET, flip, put_tokens
from tokenizers import Tokenizer

from pictool.core import UNNAMED, Geometry, Target
from pictool.errors import StoreError
from pictool.recognition import index as recognition
from pictool.recognition.index import ContentIndex, IndexThread
from pictool.recognition.matches import Match
from pictool.store.entries import keys_of
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from training.world.generate import PageShape, write_prompt

DOCS = [path.read_text() for path in sorted((Path(__file__).parents[2] / "fixtures/docs").glob("*.txt"))[:30]]
ASKED = "Which colour is the flag of Palex?"
Layout = Callable[[str, str], str]  # of a document and another one

LAYOUTS: dict[str, Layout] = {
    "question after": lambda doc, _: f"{doc}\n\n{ASKED}",
    "stripped, question after": lambda doc, _: f"{doc.strip()}\n\n{ASKED}",
    "context": lambda doc, _: f"Context:\n{doc}\nQuestion: {ASKED}",
    "context, no line end": lambda doc, _: f"Context:{doc.strip()}Question: {ASKED}",
    "tags": lambda doc, _: f"<document>{doc}</document>\n{ASKED}",
    "tags on their own lines": lambda doc, _: f'<doc id="3">\n{doc}\n</doc>\n{ASKED}',
    "last": lambda doc, _: f"Answer the question. {ASKED}\n\n{doc}",
    "numbered": lambda doc, other: f"1. {doc}2. {other}{ASKED}",
    "bracketed numbers": lambda doc, other: f"[1] {doc.strip()} [2] {other.strip()} {ASKED}",
    "quotes": lambda doc, _: f'He wrote "{doc.strip()}" and asked: {ASKED}',
    "parentheses": lambda doc, _: f"({doc.strip()}){ASKED}",
    "bold": lambda doc, _: f"**{doc.strip()}**\n{ASKED}",
    "fence": lambda doc, _: f"```\n{doc}```\n{ASKED}",
    "block quote": lambda doc, _: f"> {doc.strip()}\n\n{ASKED}",
    "indented, with trailing spaces": lambda doc, _: f"Notes\n    {doc.strip()}   \n{ASKED}",
    "system text": lambda doc, _: f"<|system|>You are a helpful assistant.<|user|>{doc}<|assistant|>",
    "adjacent": lambda doc, other: f"{other}{doc}{ASKED}",
    "adjacent, stripped": lambda doc, other: f"{other.strip()}{doc.strip()}{ASKED}",
    "joined by a space": lambda doc, other: f"{other.strip()} {doc.strip()} {ASKED}",
    "JSON": lambda doc, _: f'{{"text": "{doc.strip()}"}}',
}


def neighbours() -> Iterator[tuple[int, int]]:
    return ((i, (i + 1) % len(DOCS)) for i in range(len(DOCS)))


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    prompts = (layout(DOCS[i], DOCS[i + 1]) for layout in LAYOUTS.values() for i in range(6))
    return small_tokenizers.train(kind, (*DOCS, *prompts))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module", params=list(small_tokenizers.KINDS))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, Store(tmp_path_factory.mktemp(request.param)))


class World:
    """The sample corpus, stored as the tokens of one tokenizer."""

    def __init__(self, kind: str, store: Store) -> None:
        self.store = store
        self.tokenizer = tokenizer_of(kind)
        self.lengths = [len(encode(self.tokenizer, doc)) for doc in DOCS]
        self.keys = [put_tokens(store, encode(self.tokenizer, doc)) for doc in DOCS]
        self.index = ContentIndex(store, TARGET, 16, lambda tokens: str(self.tokenizer.decode(list(tokens), False)))
        self.index.refresh()

    def find(self, text: str) -> list[Match]:
        return self.find_tokens(encode(self.tokenizer, text))

    def find_tokens(self, tokens: list[int]) -> list[Match]:
        return self.index.find(np.asarray(tokens, dtype=np.int32))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_documents_are_recognised_in_every_layout(world: World, layout: str) -> None:
    """At least 29 of 30 documents, all but a few of their tokens, and no document that is not there."""
    num_found = 0
    for i, other in neighbours():
        matches = world.find(LAYOUTS[layout](DOCS[i], DOCS[other]))
        assert {match.key for match in matches} <= {world.keys[i], world.keys[other]}
        found = next((match for match in matches if match.key == world.keys[i]), None)
        num_found += found is not None
        assert found is None or len(found.tokens) >= world.lengths[i] - 6
    assert num_found >= 29


@cache
def other_text() -> str:
    """Pages of other books by the generator of the sample corpus, which draws from few sentences."""
    shape = PageShape(max_filler_sentences=4)
    prompts = (write_prompt(random.Random(f"other-{seed}"), 6, shape) for seed in range(540))
    return "\n".join(page for prompt in prompts for page in prompt.pages)


def test_nothing_is_recognised_in_a_million_tokens_of_other_text(world: World) -> None:
    """As many over all tokenizers."""
    tokens = encode(world.tokenizer, other_text())
    assert len(tokens) >= 1_000_000 / len(small_tokenizers.KINDS)
    for start in range(0, len(tokens), 10_000):
        assert world.find_tokens(tokens[start : start + 10_000]) == []


def test_a_document_with_another_word_is_not_recognised(world: World) -> None:
    """At its beginning too, however short the word: what comes after was computed after the word that was there."""
    for doc in DOCS[:5]:
        words = doc.split(" ")
        for at in (0, 1, len(words) // 2, len(words) - 1):
            changed = " ".join([*words[:at], "Zebra", *words[at + 1 :]])
            assert world.find(f"Context:\n{changed}\n\n{ASKED}") == []


# The index


def index_of(store: Store, target: Target = TARGET, min_tokens: int = 2) -> ContentIndex:
    decode = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
    index = ContentIndex(store, target, min_tokens, decode)
    index.refresh()
    return index


def places(index: ContentIndex, *tokens: int, salt: str = "") -> list[tuple[int, int]]:
    return [(match.start, match.end) for match in index.find(np.asarray(tokens, dtype=np.int32), salt)]


def test_what_is_recognised(store: Store) -> None:
    """Of this model, after tokens that are known, of this tenant, long enough, and no block of a prefix chain."""
    other = Target("LlamaForCausalLM", "c" * 64, "b" * 64, "float32", Geometry(2, 1, 4))
    put_tokens(store, (5, 6, 7))
    put_tokens(store, (8, 9), target=other)
    put_tokens(store, (10, 11), after=((1,) * 4,))
    put_tokens(store, (13, 14), after=((UNNAMED,) * 4,))
    put_tokens(store, (12, 13, 14), salt="mine")
    put_tokens(store, (12, 13), salt="theirs")
    put_tokens(store, (15, 16), parent="")
    put_tokens(store, (17,))
    prompt, index = range(5, 18), index_of(store)
    assert places(index, *prompt) == [(0, 3), (5, 7)]
    assert places(index, *prompt, salt="mine") == [(7, 10)]
    assert places(index, *prompt, salt="theirs") == [(7, 9)]
    assert places(index_of(store, other), *prompt) == [(3, 5)]
    assert places(index) == places(index, 1) == []


def test_every_tenant_finds_its_own_object_of_the_same_tokens(store: Store) -> None:
    keys = {salt: put_tokens(store, range(20), salt=salt) for salt in ("", "mine", "theirs")}
    index = index_of(store)
    for salt, key in keys.items():
        (match,) = index.find(np.arange(25, dtype=np.int32), salt)
        assert match.key == key


def test_of_several_codecs_the_lossless_one_is_taken(store: Store) -> None:
    keys = {codec: put_tokens(store, range(20), codec=codec) for codec in ("int4", "zstd", "int8")}
    (match,) = index_of(store).find(np.arange(25, dtype=np.int32))
    assert match.key == keys["zstd"]


def test_a_codec_may_be_asked_for(store: Store) -> None:
    keys = {codec: put_tokens(store, range(20), codec=codec) for codec in ("none", "int8")}
    index, prompt = index_of(store), np.arange(25, dtype=np.int32)
    for codec, found in {None: ["none"], "int8": ["int8"], "none": ["none"], "zstd": []}.items():
        assert [match.key for match in index.find(prompt, "", codec)] == [keys[name] for name in found]
    store.path(keys["int8"]).unlink()
    index.refresh()
    assert index.find(prompt, "", "int8") == [] != index.find(prompt)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the objects that are read from now on."""
    keys: list[str] = []
    peek = Store.peek_local

    def spied(store: Store, key: str) -> ObjectFile:
        keys.append(key)
        return peek(store, key)

    monkeypatch.setattr(Store, "peek_local", spied)
    return keys


def test_the_index_follows_the_store_and_reads_only_what_is_new(store: Store, read: list[str]) -> None:
    first = put_tokens(store, (5, 6, 7))
    put_tokens(store, (1,))  # too short
    index = index_of(store)
    assert len(read) == 2
    second = put_tokens(store, (8, 9))
    assert places(index, 5, 6, 7, 8, 9) == [(0, 3)]
    index.refresh()
    assert read[2:] == [second]
    assert places(index, 5, 6, 7, 8, 9) == [(0, 3), (3, 5)]
    store.path(first).unlink()
    index.refresh()
    assert places(index, 5, 6, 7, 8, 9) == [(3, 5)]
    put_tokens(store, (5, 6, 7))
    index.refresh()
    assert read[2:] == [second, first] and places(index, 5, 6, 7, 8, 9) == [(0, 3), (3, 5)]


def test_an_object_that_was_seen_half_written_is_recognised_when_it_is_whole(store: Store) -> None:
    """As one that a copy or a network file system brings, in place."""
    path = store.path(put_tokens(store, range(20)))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    index = index_of(store)
    assert places(index, *range(20)) == []
    path.write_bytes(data[: len(data) - 1])
    index.refresh()
    assert places(index, *range(20)) == []
    path.write_bytes(data)
    index.refresh()
    assert places(index, *range(20)) == [(0, 20)]


def test_a_damaged_object_stays_forgotten_until_its_file_changes(store: Store, read: list[str]) -> None:
    """Its header and tokens are sound: only who reads its KV finds out."""
    path = store.path(put_tokens(store, range(20)))
    data = path.read_bytes()
    flip(path, len(data) - 40)
    index = index_of(store)
    assert places(index, *range(20)) == [(0, 20)]
    index.mark_suspect(path.stem)
    assert places(index, *range(20)) == []
    for _ in range(3):
        index.refresh()
        assert places(index, *range(20)) == []
    assert len(read) == 2, "a file that is known to be damaged is read again and again"
    path.touch()
    index.refresh()
    assert places(index, *range(20)) == []
    path.write_bytes(data)
    index.refresh()
    assert places(index, *range(20)) == [(0, 20)]


def test_a_sound_object_that_was_in_doubt_is_recognised_again(store: Store) -> None:
    key = put_tokens(store, range(20))
    index = index_of(store)
    index.mark_suspect(key)
    index.mark_suspect("0" * 64)
    assert places(index, *range(20)) == []
    index.refresh()
    assert places(index, *range(20)) == [(0, 20)]


def test_a_directory_that_cannot_be_read_costs_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = put_tokens(store, (5, 6, 7)), put_tokens(store, (8, 9))
    index = index_of(store)
    third = put_tokens(store, (10, 11))
    assert len({key[:2] for key in (first, second, third)}) == 3

    def broken(root: Path, shard: str) -> list[str]:
        if shard == first[:2]:
            raise PermissionError(13, "Permission denied")
        return keys_of(root, shard)

    monkeypatch.setattr(recognition, "keys_of", broken)
    store.path(second).unlink()
    with pytest.raises(StoreError, match=f"objects/{first[:2]}: .*Permission denied"):
        index.refresh()
    assert places(index, 5, 6, 7, 8, 9, 10, 11) == [(0, 3), (5, 7)]
    monkeypatch.setattr(recognition, "shards", lambda root: broken(root, first[:2]))
    with pytest.raises(StoreError, match=f"^{store.root / 'objects'}: "):
        index.refresh()
    assert places(index, 5, 6, 7, 8, 9, 10, 11) == [(0, 3), (5, 7)]


# Its thread


class Stubborn:
    """An index whose readings end as they are told to, one after another."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends, self.num_read, self.is_done = [*ends], 0, threading.Event()

    def refresh(self) -> None:
        self.num_read += 1
        end = self.ends.pop(0) if self.ends else None
        if not self.ends:
            self.is_done.set()
        if end is not None:
            raise end


def test_the_thread_survives_errors_and_says_so_once() -> None:
    warnings: list[str] = []
    index = Stubborn(StoreError("x: cannot be read"), StoreError("x: cannot be read"), ValueError("odd"), None, None)
    thread = IndexThread(index, 0.001, warnings.append)  # type: ignore[arg-type]
    thread.start()
    thread.start()
    assert index.is_done.wait(60)
    thread.close()
    begin = "the index of stored documents: "
    assert warnings == [f"{begin}x: cannot be read", f"{begin}ValueError: odd", f"{begin}the store is read again"]


def test_the_thread_reads_when_it_is_woken_and_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_LEAST_PAUSE_S", 0)
    index = Stubborn(None, None)
    thread = IndexThread(index, 1000, lambda _: None)  # type: ignore[arg-type]
    assert not thread.is_started and not thread.wait(0)
    thread.start()
    assert thread.wait(60) and not index.is_done.is_set()
    thread.wake()
    assert index.is_done.wait(60)
    thread.close()
    running = thread._thread
    assert running is not None
    running.join(60)
    assert not running.is_alive() and index.num_read == 2
