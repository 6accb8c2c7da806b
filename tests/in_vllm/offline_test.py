"""`answer` and `compile` on vLLM: the same objects, the same answers and the same report as our own engine's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import vllm_rig as rig

from pictool.api import answer, compile
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import Compiled, object_key
from pictool.core import Chunk, CompileOptions, Sampling
from pictool.engines.torch import TorchEngine
from pictool.engines.vllm.client.offline import VllmEngine
from pictool.errors import InputError, ModelError, StoreError
from pictool.linker.policies import make_policy
from pictool.linker.spec import Document, Spec
from pictool.runtime.model import wrap_model
from pictool.store.store import Store

OPTIONS = {
    name: value for name, value in rig.default_options().items() if name not in ("max_model_len", "disable_log_stats")
}


def test_one_call_starts_and_stops(tmp_path: Path) -> None:
    """First of all: it starts engines of its own, and a process has room for one at a time."""
    world = rig.make_world(tmp_path, "llama")
    chunks = rig.text_chunks(world.model)
    with VllmEngine(world.model, world.store, options=OPTIONS) as engine:
        done = engine.compile(chunks)
    assert [compiled.key for compiled in done] == [object_key(world.model, chunk) for chunk in chunks]
    with VllmEngine(world.model, world.store, options={"no such option": 1}) as idle:  # it does not start
        assert not any(compiled.is_new for compiled in idle.compile(chunks))
    question = Spec("why?", chunks, rig.policy_of("legolink-4"), max_new_tokens=6)
    with VllmEngine(world.model, world.store, options=OPTIONS) as engine:
        given = engine.answer(question)
        linked = engine.link(question)
    assert given.text == answer(world.model, world.store, question).text
    ours = TorchEngine(world.model, world.store).link(question)
    assert linked.logits is not None and ours.logits is not None and linked.recomputed == ours.recomputed
    assert (linked.logits - ours.logits.log_softmax(-1)).abs().max() <= rig.TOLERANCE


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3", "gemma2"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> rig.World:
    return rig.make_world(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(world: rig.World) -> Iterator[VllmEngine]:
    options = {**OPTIONS, "max_num_batched_tokens": 64}
    with VllmEngine(world.model, world.store, max_model_len=1024, options=options) as engine:
        yield engine
    gc.collect()


def layers_of(store: Store, key: str) -> torch.Tensor:
    with store.open(key) as file:
        shape = (2, 2, file.meta.num_tokens, -1)
        raw = [b"".join(file.layer(i)) for i in range(file.meta.target.geometry.layers)]
    return torch.stack([torch.from_numpy(np.frombuffer(layer, dtype=np.float32).copy()).view(shape) for layer in raw])


def require_whole(world: rig.World, compiled: Compiled) -> None:
    """As `pic store verify` has it, and for this model's own dummy token."""
    with world.store.peek_local(compiled.key) as file:
        file.verify()
        file.meta.require(world.model.target, "compiled")
        file.meta.require_dummy(world.model.bos_id, "compiled")
        assert file.meta.key_of(file.tokens()) == compiled.key
        assert (file.text(), tuple(file.tokens().tolist())) == (compiled.chunk.text, compiled.chunk.tokens)


@pytest.mark.parametrize("sinks", [0, 4])
def test_its_objects_are_ours(world: rig.World, engine: VllmEngine, sinks: int, tmp_path: Path) -> None:
    """Chunks of one token, of more than a block, and of more than one forward takes."""
    chunks = [*rig.text_chunks(world.model), *(make_chunk(world.model, text, "t") for text in ("a", tiny.TEXT * 2))]
    mine = Store(tmp_path / "mine")
    compile(world.model, mine, chunks, sinks=sinks, alone=True)
    reported: list[Compiled] = []
    done = engine.compile(chunks, CompileOptions(sinks), on_done=reported.append)
    assert reported == done and all(compiled.is_new for compiled in done)
    for compiled in done:
        a, b = layers_of(mine, compiled.key), layers_of(world.store, compiled.key)
        assert (a[0] - b[0]).abs().max() <= 1e-5
        assert (a - b).abs().max() <= rig.TOLERANCE
        require_whole(world, compiled)
    assert not any(compiled.is_new for compiled in engine.compile(chunks, CompileOptions(sinks)))
    assert all(compiled.is_new for compiled in engine.compile(chunks[:1], CompileOptions(sinks), force=True))


def request(spec: str, chunks: list[Chunk], **more: object) -> Spec:
    return Spec("nobody knows?", chunks, rig.policy_of(spec), max_new_tokens=8, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["full", "naive", "legolink-4", "legolink-0", "cacheblend-15"])
def test_its_answers_and_reports_are_ours(world: rig.World, engine: VllmEngine, spec: str, tmp_path: Path) -> None:
    asked = request(spec, rig.text_chunks(world.model))
    want = answer(world.model, Store(tmp_path / "mine"), asked, compare=True)
    texts: list[str] = []
    got = engine.answer(asked, compare=True, on_text=texts.append)
    assert got.generated.tokens == want.generated.tokens
    assert "".join(texts).strip() == got.text == want.text
    assert got.generated.logprobs == pytest.approx(want.generated.logprobs, abs=rig.TOLERANCE)
    mine, theirs_ = want.report(), got.report()
    assert {**mine["tokens"], "recomputed": pytest.approx(mine["tokens"]["recomputed"])} == theirs_["tokens"]
    for field in ("answer", "algo", "params", "model"):
        assert mine[field] == theirs_[field]
    assert (mine["engine"], theirs_["engine"]) == ("torch", "vllm")
    assert mine["timing"].keys() == theirs_["timing"].keys() and min(theirs_["timing"].values()) >= 0
    assert mine["compare"].keys() == theirs_["compare"].keys()
    assert theirs_["compare"]["kl"] == pytest.approx(mine["compare"]["kl"], abs=1e-4)
    for field in ("answer", "same_first_token", "same_answer", "common_prefix"):
        assert mine["compare"][field] == theirs_["compare"][field]


def test_stop_strings_and_sampling(world: rig.World, engine: VllmEngine) -> None:
    chunks = rig.text_chunks(world.model)
    whole = engine.answer(request("naive", chunks))
    stop = whole.generated.text[1:3]
    cut = engine.answer(request("naive", chunks, sampling=Sampling(stop=(stop,))))
    assert cut.generated.text == whole.generated.text.partition(stop)[0]
    drawn = [engine.answer(request("naive", chunks, sampling=Sampling(1.5, 0.9, seed))).text for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1


def test_documents_as_files_objects_and_keys(world: rig.World, engine: VllmEngine, tmp_path: Path) -> None:
    """An object from elsewhere is copied into the store."""
    chunk = make_chunk(world.model, "The spring festival.", "t")
    other = Store(tmp_path / "other")
    (done,) = compile(world.model, other, [chunk])
    file = tmp_path / "mine.kvo"
    file.write_bytes(done.path.read_bytes())
    text = tmp_path / "a.txt"
    text.write_text("Nobody knows the harbour.")
    compiled: list[Compiled] = []
    documents_twice: list[list[Document]] = [[text, file], [text, done.key]]
    answers = [
        engine.answer(Spec("why?", documents, make_policy("naive", {}), max_new_tokens=4), on_compile=compiled.append)
        for documents in documents_twice
    ]
    assert answers[0].generated.tokens == answers[1].generated.tokens
    assert [done.chunk.source for done in compiled if done.chunk.source != "head"] == [str(text)]


def test_a_damaged_object_is_an_error_here(world: rig.World, engine: VllmEngine) -> None:
    """A server answers exactly; a command line that names objects gets the error."""
    chunk = make_chunk(world.model, "Straße, 東京.", "t")
    (done,) = engine.compile([chunk])
    data = bytearray(done.path.read_bytes())
    data[-200] ^= 1
    done.path.write_bytes(data)
    with pytest.raises(InputError, match="checksum"):
        engine.answer(Spec("why?", [done.key], make_policy("naive", {})))
    done.path.unlink()
    with pytest.raises(StoreError, match=done.key[:12]):
        engine.answer(Spec("why?", [done.key], make_policy("naive", {})))


def test_what_does_not_fit_is_refused(world: rig.World, engine: VllmEngine) -> None:
    for empty in (Chunk("", (), "empty.txt"), Chunk("", (5, 6), "other.txt")):
        with pytest.raises(InputError, match=f"{empty.source}: "):
            engine.compile([empty])
        assert not world.store.path(object_key(world.model, empty)).exists()
    with pytest.raises(InputError, match="too long"):
        engine.compile([make_chunk(world.model, tiny.TEXT * 10, "long.txt")])
    with pytest.raises(ModelError, match="directories"):
        VllmEngine(wrap_model(tiny.random_module(rig.CONFIGS["llama"]()), tiny.tokenizer()), world.store)
