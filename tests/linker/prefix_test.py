"""`prefix`: exact, reuses what the theory says, and its chains are stored, evicted and kept apart as they should be."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from subjects import ARCHITECTURES, HEAD, LENGTH_DEPENDENT, LENGTHS, Subject, make_chunks, max_difference, parts_of, run
from subjects import subject as subject_of

from pictool.core import Chunk, PromptText
from pictool.errors import ForeignObjectError, InputError, StoreError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.runtime.model import wrap_model
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from pictool.store.upkeep import verify

PREFIX = make_policy("prefix", {})
BY_FOUR = make_policy("prefix", {"block": 4})


@pytest.fixture
def llama() -> Subject:
    return subject_of("llama")


def computed(linked: Linked) -> int:
    """Context rows that were computed, at every layer."""
    return int(linked.recomputed)


def tokens(*ids: int) -> list[Chunk]:
    return [Chunk("tokens", ids, "test")]


def of_text(text: str) -> list[Chunk]:
    """A token for a letter."""
    return tokens(*(ord(letter) for letter in text if letter not in " |"))


def blocks(store: Store) -> Iterator[ObjectFile]:
    for key in store.keys():
        with store.peek(key) as file:
            yield file


def salted(one: Subject, salt: str) -> Subject:
    return replace(one, model=wrap_model(one.model.module, one.model.tokenizer, one.model.name, salt))


@pytest.mark.parametrize(
    ("architecture", "block"),
    [
        *((name, 4) for name in ARCHITECTURES),
        *((name, block) for name in ("llama", *LENGTH_DEPENDENT) for block in (1, 16)),
    ],
)
def test_a_stored_beginning_gives_what_full_gives(architecture: str, block: int, store: Store) -> None:
    one, policy = subject_of(architecture), make_policy("prefix", {"block": block})
    chunks = make_chunks(LENGTHS)
    first, again = (run(one, store, policy, chunks) for _ in range(2))
    full = run(one, store, make_policy("full", {}), chunks)
    context = full.image.layout.num_context
    assert computed(first) == context
    head = full.image.layout.head[1] if architecture in LENGTH_DEPENDENT else 0
    assert computed(again) in (context % block, min(context, context % block + head))
    for layer in range(one.model.geometry.layers):
        for mine, theirs in ((again.image.key, full.image.key), (again.image.value, full.image.value)):
            assert float((mine(layer) - theirs(layer)).abs().max()) <= 1e-5
    assert again.image.logits is not None and full.image.logits is not None
    assert float((again.image.logits - full.image.logits).abs().max()) <= 1e-5
    assert max_difference(again, reference.full(one.reference, sum(parts_of(again), []))) <= 1e-4


def test_the_example_of_the_article(llama: Subject, store: Store) -> None:
    """Blocks of 4 (prefix caching article §4.3): 0, then 2 blocks of a common beginning of 10, then 3 of 12."""
    requests = ["ABCD|EFGH|IJKL|MNO", "ABCD|EFGH|IJkl|mn", "ABCD|EFGH|IJKL|0123|4567|89:;|<=>?|@"]
    linked = [run(llama, store, BY_FOUR, of_text(text), head="", tail="!") for text in requests]
    assert [one.image.layout.num_context - computed(one) for one in linked] == [0, 8, 12]


def test_a_middle_that_is_the_same_is_not_reused(llama: Subject, store: Store) -> None:
    """The article's §4.4.3."""
    run(llama, store, BY_FOUR, of_text("ABCD|EFGH"), head="")
    assert computed(run(llama, store, BY_FOUR, of_text("DCAB|EFGH"), head="")) == 8


@given(st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=14), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_reuses_the_longest_common_beginning_in_whole_blocks(
    llama: Subject, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]], block: int
) -> None:
    """Against a plain search through all earlier prompts (their tails are stored, too)."""
    store, policy = Store(tmp_path_factory.mktemp("store")), make_policy("prefix", {"block": block})
    earlier: list[list[int]] = []
    for ids in prompts:
        linked = run(llama, store, policy, tokens(*ids), head="")
        longest = max((common(ids, other) for other in earlier), default=0)
        assert computed(linked) == len(ids) - longest // block * block
        earlier.append(whole_blocks(linked.image.layout.tokens.tolist(), block))


def common(ids: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))


def whole_blocks(ids: list[int], block: int) -> list[int]:
    return ids[: len(ids) // block * block]


def test_keys_are_sha256_over_parent_tokens_and_extra_keys(llama: Subject) -> None:
    target, parent, wanted = llama.model.target, "", []
    named = {name: getattr(target, name) for name in ("architecture", "model", "tokenizer", "dtype")}
    named |= {"geometry": {"layers": 3, "kv_heads": 2, "head_dim": 8}}
    for start in (0, 4):
        digest = hashlib.sha256(json.dumps(named | {"parent": parent, "rotation": "r"}, sort_keys=True).encode())
        digest.update(np.arange(start, start + 4, dtype="<i4").tobytes())
        salted = hmac.new(b"s", digest.hexdigest().encode(), hashlib.sha256).hexdigest()
        parent = hashlib.sha256(f"{digest.hexdigest()} {salted}".encode()).hexdigest()
        wanted.append(parent)
    blocks = target.identify_blocks(np.arange(11, dtype=np.int32), 4, "r", "s")
    assert [block.key for block in blocks] == wanted


def test_a_head_of_one_prompt_may_end_within_a_block(llama: Subject, store: Store) -> None:
    """What is head, chunk or tail makes no difference: only the tokens do."""
    first = run(llama, store, BY_FOUR, make_chunks((29, 17)))
    whole = Chunk("whole", tuple(first.image.layout.tokens.tolist()), "test")
    again = run(llama, store, BY_FOUR, [whole], head="", tail=" how?")
    assert computed(again) == len(whole) % 4


@pytest.mark.parametrize("architecture", LENGTH_DEPENDENT)
def test_prompts_that_are_rotated_otherwise_share_nothing(architecture: str, store: Store) -> None:
    one, short, long = subject_of(architecture), make_chunks((40,)), make_chunks((40, 150))
    run(one, store, BY_FOUR, short, head="")
    linked = run(one, store, BY_FOUR, long, head="")
    assert computed(linked) == 190
    assert max_difference(linked, reference.full(one.reference, sum(parts_of(linked), []))) <= 1e-4


def test_another_salt_never_hits(llama: Subject, store: Store) -> None:
    mine, other = salted(llama, "mine"), salted(llama, "other")
    chunks = make_chunks((29,))
    for one, wanted in ((mine, 36), (other, 36), (llama, 36), (mine, 0), (other, 0), (llama, 0)):
        linked = run(one, store, BY_FOUR, chunks)
        assert computed(linked) == (linked.image.layout.num_context if wanted else linked.image.layout.num_context % 4)


def test_another_salt_never_hits_chunks(llama: Subject, store: Store) -> None:
    mine, chunks = salted(llama, "mine"), make_chunks((29,))
    run(mine, store, make_policy("naive", {}), chunks)
    (key,) = (file.meta.key for file in blocks(store) if file.meta.num_tokens == 29)
    assert key == mine.model.key(chunks[0].tokens, "none") != llama.model.key(chunks[0].tokens, "none")
    for one in (llama, salted(llama, "other")):
        assert not store.has(one.model.key(chunks[0].tokens, "none"))
        with pytest.raises(StoreError, match=key[:12]):
            run(one, store, make_policy("naive", {}), [key])
        with pytest.raises(ForeignObjectError, match=f"^{store.path(key)}: .*salt"):
            run(one, store, make_policy("naive", {}), [str(store.path(key))])
    assert run(mine, store, make_policy("naive", {}), [key]).bytes_read
    assert all(b"mine" not in path.read_bytes() for path in store.root.rglob("*.kvo"))


def test_another_dtype_or_model_never_hits(llama: Subject, store: Store) -> None:
    run(llama, store, BY_FOUR, make_chunks((29,)))
    other = wrap_model(tiny.random_module(tiny.CONFIGS["llama"](), seed=5), tiny.tokenizer(), "other")
    linked = run(Subject(other, None), store, BY_FOUR, make_chunks((29,)))
    assert computed(linked) == linked.image.layout.num_context


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=8), st.integers(1, 24))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_eviction_takes_the_tails_first(
    llama: Subject, tmp_path_factory: pytest.TempPathFactory, prompts: list[tuple[int, int]], room: int
) -> None:
    """Whatever the budget, no stored block lacks its parent, and every link is exact in what it reuses."""
    size = block_bytes(llama, tmp_path_factory)
    store = Store(tmp_path_factory.mktemp("store"), max_bytes=room * size + size // 2)
    for kind, length in prompts:
        linked = run(llama, store, BY_FOUR, tokens(*([3 + kind] * length)), head="")
        assert computed(linked) >= length % 4
        found = {file.meta.key: file.meta.parent for file in blocks(store)}
        assert all(parent in {"", *found} for parent in found.values())
        assert len(found) <= room


def block_bytes(llama: Subject, tmp_path_factory: pytest.TempPathFactory) -> int:
    store = Store(tmp_path_factory.mktemp("one"))
    run(llama, store, BY_FOUR, tokens(3, 3, 3), head="")
    return max(path.stat().st_size for path in store.root.rglob("*.kvo"))


def test_gc_takes_the_tails_first(llama: Subject, store: Store) -> None:
    from pictool.store.upkeep import gc

    run(llama, store, BY_FOUR, tokens(*range(3, 43)), head="")
    depths = {file.meta.key: depth_of(store, file) for file in blocks(store)}
    used = sum(path.stat().st_size for path in store.root.rglob("*.kvo"))
    gc(store, used // 2)
    left = sorted(depths[key] for key in store.keys())
    assert left == list(range(len(left))) and 0 < len(left) < len(depths)


def depth_of(store: Store, file: ObjectFile) -> int:
    parent = file.meta.parent
    if not parent:
        return 0
    with store.peek(parent) as found:
        return 1 + depth_of(store, found)


@pytest.mark.parametrize("offset", [20, -150])
def test_a_damaged_block_is_computed_again(
    offset: int, llama: Subject, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks((29,))
    first = run(llama, store, BY_FOUR, chunks)
    damaged = next(file.path for file in blocks(store) if depth_of(store, file) == 3)
    data = bytearray(damaged.read_bytes())
    data[offset] ^= 1
    damaged.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = run(llama, store, BY_FOUR, chunks)
    assert computed(again) == again.image.layout.num_context - 12
    assert again.image.logits is not None and first.image.logits is not None
    assert float((again.image.logits - first.image.logits).abs().max()) <= 1e-5
    assert (str(damaged) in caplog.text) == (offset < 0)  # a block that cannot even be opened is as good as none
    assert verify(store).problems == {} and computed(run(llama, store, BY_FOUR, chunks)) < 4


def test_a_damaged_block_of_a_store_that_cannot_be_changed(
    llama: Subject, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks((29,))
    run(llama, store, BY_FOUR, chunks)
    damaged = next(file.path for file in blocks(store) if depth_of(store, file) == 3)
    damaged.write_bytes(damaged.read_bytes()[:-150] + bytes(150))

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("store: cannot be written; nothing was changed")

    monkeypatch.setattr("pictool.store.objects.chains.take_out", refuse)
    monkeypatch.setattr(Store, "put", refuse)
    linked = run(llama, store, BY_FOUR, chunks)
    assert computed(linked) == linked.image.layout.num_context - 12
    assert "the prefix chain is not stored" in caplog.text
    assert max_difference(linked, reference.full(llama.reference, sum(parts_of(linked), []))) <= 1e-4


def test_a_block_is_no_document(llama: Subject, store: Store) -> None:
    run(llama, store, BY_FOUR, make_chunks((29,)))
    key = store.keys()[0]
    with pytest.raises(InputError, match=f"^{store.path(key)}: "):
        run(llama, store, make_policy("naive", {}), [str(store.path(key))])
    with pytest.raises(StoreError, match=key[:12]):
        run(llama, store, make_policy("naive", {}), [key])


def test_listings_leave_blocks_out(llama: Subject, store: Store) -> None:
    run(llama, store, make_policy("naive", {}), make_chunks((29,)))
    objects = {one.key for one in store.objects()}
    run(llama, store, BY_FOUR, make_chunks((29,)))
    assert {one.key for one in store.objects()} == objects < {one.key for one in store.objects(chains=True)}


def test_links_side_by_side(llama: Subject, store: Store) -> None:
    chunks = make_chunks((29, 17))
    wanted = reference.full(llama.reference, sum(parts_of(run(llama, store, BY_FOUR, chunks)), []))
    for path in store.root.rglob("*.kvo"):
        path.unlink()
    worst: list[float] = []

    def work() -> None:
        worst.extend(max_difference(run(llama, store, BY_FOUR, chunks), wanted) for _ in range(4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 16 and max(worst) <= 1e-4


def test_few_open_files(llama: Subject, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain longer than the files that may be open is reused as far as these go."""
    chunks = make_chunks((29,))
    run(llama, store, BY_FOUR, chunks)
    monkeypatch.setattr("pictool.linker.chains.allow_open_files", lambda count: min(count, 5))
    assert computed(run(llama, store, BY_FOUR, chunks)) == 29 + len(llama.model.encode(PromptText(HEAD))) - 20


def test_fields() -> None:
    with pytest.raises(InputError, match="block=0"):
        make_policy("prefix", {"block": 0})


def test_the_store_path_may_be_anything(llama: Subject, tmp_path: Path) -> None:
    store = Store(tmp_path / "a b%20é\n")
    run(llama, store, BY_FOUR, make_chunks((29,)))
    assert computed(run(llama, store, BY_FOUR, make_chunks((29,)))) < 4
