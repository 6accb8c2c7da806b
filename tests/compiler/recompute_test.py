"""Objects computed again: honest ones of every codec and dtype are right, planted ones are found and set aside."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from benchmarks.recompute import enlarged, replaced
from pictool import Model, Store, load_model
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import compile_chunks, compute_chunks, object_key
from pictool.compiler.recompute import LIMITS, NOBODY, choose, find_difference, recompute
from pictool.core import Chunk, CompileOptions
from pictool.runtime.prefill import rounded_anew
from pictool.store.codecs import codecs
from pictool.store.objects.format import ObjectFile
from pictool.store.signatures import Signers, SigningKey, Trust, sidecar_of, sign_object_file
from training.world.generate import PageShape, write_prompt

TEXTS = [f"Document {number} tells of harbour {number * 7}, where {number} ships lie." for number in range(12)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny", tiny.CONFIGS["llama"]())


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load_model(str(directory), "cpu")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def plant(model: Model, store: Store, texts: list[str], codec: str = "none") -> list[str]:
    chunks = {model.key(chunk.tokens, codec): chunk for chunk in (make_chunk(model, text, "x") for text in texts)}
    for chunk in compute_chunks(model, chunks, CompileOptions(codec=codec)):
        store.put(enlarged(chunk, 1, model.dtype))
    return list(chunks)


@pytest.mark.parametrize("codec", sorted(codecs()))
def test_honest_objects_are_right_and_planted_ones_are_not(model: Model, store: Store, codec: str) -> None:
    compile_chunks(model, store, TEXTS[:6], CompileOptions(codec, after="text" if codec == "none" else "none"))
    assert recompute(model, store, store.keys(), 1.0).problems == {}
    bad = plant(model, store, TEXTS[6:8], codec)
    found = recompute(model, store, store.keys(), 1.0)
    assert set(found.problems) == set(bad) and found.writers == {NOBODY: (8, 2)}
    assert all("layer 1's value" in line for line in found.problems.values())
    assert not set(bad) & set(store.keys())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packs_are_noise_in_every_dtype(directory: Path, store: Store, dtype: str) -> None:
    model = load_model(str(directory), "cpu", dtype)
    compile_chunks(model, store, TEXTS)
    found = recompute(model, store, store.keys(), 1.0)
    assert found.problems == {} and found.objects == len(TEXTS)


@pytest.mark.parametrize("dtype", sorted(LIMITS))
@pytest.mark.parametrize("codec", sorted(codecs()))
def test_objects_of_another_machine_are_noise(directory: Path, store: Store, dtype: str, codec: str) -> None:
    model = load_model(str(directory), "cpu", dtype)
    with rounded_anew(model.stack, seed=99):  # as other threads, packs and processors round
        compile_chunks(model, store, TEXTS[:4], CompileOptions(codec=codec))
    assert recompute(model, store, store.keys(), 1.0).problems == {}


@pytest.mark.parametrize(("name", "count", "length", "forged"), [
    ("embedded-small", 1, 700, 12),  # so few of all that the whole layer differs by less than its noise may be
    ("tiny", 1, 64, 16), ("tiny", 4, 64, 16), ("tiny", 16, 64, 16),
])  # fmt: skip
def test_a_few_forged_tokens_are_found(
    directory: Path, store: Store, name: str, count: int, length: int, forged: int
) -> None:  # fmt: skip
    model, draw = load_model(str(directory) if name == "tiny" else name, "cpu", "bfloat16"), random.Random(count)
    pages = [page for seed in range(4) for page in write_prompt(random.Random(seed), 8, PageShape()).pages]
    tokens = model.encode(" ".join(pages))  # that the embedded model has learned to tell apart
    others, chunk = sorted(set(tokens)), Chunk("", tuple(tokens[:length]), "x")
    (honest,) = compute_chunks(model, {object_key(model, chunk): chunk})
    forgeries = [replaced(model, honest, count, draw, others) for _ in range(forged)]
    for compiled, is_forged in ((honest, False), *((forgery, True) for forgery in forgeries)):
        with ObjectFile(store.put(compiled, durable=False)) as file:
            assert (find_difference(model, file) is not None) == is_forged


def test_a_rerouted_token_is_noise_but_its_own_layer_0_is_not(tmp_path: Path, store: Store) -> None:
    model = load_model(str(tiny.save_model(tmp_path / "moe", tiny.CONFIGS["mixtral"]())), "cpu", "bfloat16")
    chunk, draw = make_chunk(model, " ".join(TEXTS[:3]), "x"), random.Random(1)
    (honest,) = compute_chunks(model, {object_key(model, chunk): chunk})
    forged = replaced(model, honest, 1, draw, list(range(100, 250)))
    rerouted = replace(forged, layers=[honest.layers[0], *forged.layers[1:]])
    for compiled, is_right in ((rerouted, True), (forged, False)):
        store.put(compiled)
        assert (not recompute(model, store, store.keys(), 1.0).problems) == is_right


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3"])
def test_hybrids_and_latents_are_computed_again(tmp_path: Path, store: Store, name: str) -> None:
    model = load_model(str(tiny.save_model(tmp_path / name, tiny.CONFIGS[name]())), "cpu")
    compile_chunks(model, store, [" ".join(TEXTS[:6])])
    found = recompute(model, store, store.keys(), 1.0)
    assert found.problems == {} and found.objects == 1


def test_a_planted_object_is_found_at_the_share_s_rate(model: Model, store: Store) -> None:
    (bad,) = plant(model, store, TEXTS[:1])
    compile_chunks(model, store, TEXTS[1:])
    with store.peek(bad) as file:
        assert find_difference(model, file)
    hits = sum(bad in choose(store.keys(), 0.25) for _ in range(2000))
    assert 400 < hits < 600  # 500 are expected: five standard deviations are 97
    assert len(choose(store.keys(), 0.01)) == 1 and choose([], 1.0) == []


def test_the_writer_s_share_is_told(model: Model, tmp_path: Path) -> None:
    keys = [SigningKey.new(tmp_path / name) for name in ("a", "b")]
    trust = Trust(Signers(tmp_path / "signers", {key.public: key.path.name for key in keys}, {}))
    store = Store(tmp_path / "store", trust=trust)
    good = [done.key for done in compile_chunks(model, store, TEXTS[:3])]
    (bad,) = plant(model, store, TEXTS[3:4])
    for key, signer in zip([*good[:2], bad], [keys[0], keys[1], keys[1]], strict=True):
        sign_object_file(signer, store.path(key))
    found = recompute(model, store, store.keys(), 1.0)
    assert found.writers == {"a": (1, 0), "b": (2, 1), NOBODY: (1, 0)} and list(found.problems) == [bad]
    assert not store.path(bad).exists() and not sidecar_of(store.path(bad)).exists()


def test_what_is_not_of_its_tokens_alone_is_skipped(model: Model, store: Store, directory: Path) -> None:
    other = load_model(str(directory), "cpu", "bfloat16")
    compile_chunks(other, store, TEXTS[:2])
    found = recompute(model, store, store.keys(), 1.0)
    assert (found.objects, found.skipped) == (0, 2)
