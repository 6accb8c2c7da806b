"""Generated objects: exact at their own place, named by what they were generated from, and nothing else's (rule 9)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from pictool.core import Chunk, GeneratedChunk, PromptText, Sampling, Text
from pictool.engines.base import Answer
from pictool.engines.torch import TorchEngine
from pictool.errors import StoreError, TraceError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Selection, first_rows
from pictool.linker.policies.legolink import LegoLink
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, wrap_model
from pictool.spans.dsl import g, plus, repeat
from pictool.spans.execute import Executor
from pictool.spans.generated import answer_and_keep, keep_output
from pictool.spans.query import Path as NodePath
from pictool.spans.running import Hooks, RunOptions
from pictool.store.store import Store
from pictool.trace.format import read_trace
from pictool.trace.replay import replay

NAIVE, FULL = make_policy("naive"), make_policy("full")
TAIL = "Question: the harbour?\nAnswer:"
ARCHITECTURES = ["llama", "qwen3", "phi3-partial", "llama-yarn", "gemma2", "mistral-window"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS[request.param]()), tiny.tokenizer(), request.param)


@pytest.fixture
def engine(model: Model, store: Store) -> TorchEngine:
    return TorchEngine(model, store)


def plain(chunk: Chunk) -> Chunk:
    """A chunk of the same tokens that nobody generated."""
    return Chunk(chunk.text, chunk.tokens, chunk.source)


def generate(
    engine: TorchEngine, seam: str = "\n", count: int = 5, tail: str = TAIL, temperature: float = 1.0
) -> tuple[Answer, GeneratedChunk]:
    """An answer of `count` tokens after `tail`, and the chunk of it with its seam."""
    spec = Spec.raw((), tail, NAIVE, "<s>")
    spec = replace(spec, max_new_tokens=count, sampling=Sampling(temperature, seed=4))
    answer = answer_and_keep(engine, spec)
    tokens, after = answer.generated.tokens, engine.model.encode(seam)
    assert len(tokens) == count and tokens[-1] not in engine.model.eos_ids
    text = answer.generated.text + seam
    key = keep_output(engine.store, answer, tokens, after, text, "none")
    assert key is not None
    return answer, GeneratedChunk(text, (*tokens, *after), "output", key)


def test_at_its_own_place_after_its_own_input_it_is_exact(engine: TorchEngine) -> None:
    _, chunk = generate(engine)
    spec = Spec.raw([chunk], "the festival", NAIVE, "<s>" + TAIL)
    # The inner prompt was <s> and a tail; as one head it has to have the same tokens.
    assert engine.model.encode(PromptText("<s>" + TAIL)) == (0, *engine.model.encode(TAIL))
    full = engine.link(replace(spec, policy=FULL))
    reused = engine.link(spec)
    compiled = engine.link(replace(spec, documents=[plain(chunk)]))
    assert full.logits is not None and reused.logits is not None and compiled.logits is not None
    assert reused.recomputed == 0
    assert (reused.logits - full.logits).abs().max() <= 1e-4
    assert (compiled.logits - full.logits).abs().max() > 1e-2


def test_elsewhere_layer_0_is_exact(engine: TorchEngine) -> None:
    _, chunk = generate(engine)
    spec = Spec.raw([Chunk("a", tuple(range(5, 15)), "a"), chunk], "the festival", NAIVE, "<s>")
    reused, full = engine.link(spec).linked, engine.link(replace(spec, policy=FULL)).linked
    assert reused is not None and full is not None
    assert [part.generated for part in reused.parts] == ["", chunk.object]
    assert [part.generated for part in full.parts] == ["", ""]
    for side in ("key", "value"):
        torch.testing.assert_close(getattr(reused.image, side)(0), getattr(full.image, side)(0), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def llama() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer(), "llama")


def test_its_name_is_its_own(llama: Model, store: Store) -> None:
    engine = TorchEngine(llama, store)
    chunk = generate(engine)[1]
    key = chunk.object
    assert generate(engine)[1].object == key != generate(engine, seam="")[1].object
    (compiled,) = engine.compile([chunk])
    assert compiled.is_new and compiled.key != key
    with store.peek(key) as file:
        assert file.meta.parent and np.array_equal(file.tokens(), np.asarray(chunk.tokens))
        file.verify()
    assert {stored.key for stored in store.objects()} & {key, compiled.key} == {compiled.key}
    with pytest.raises(StoreError):
        engine.link(Spec.raw([key], "x", NAIVE))


def test_one_that_was_evicted_is_compiled(llama: Model, store: Store) -> None:
    engine = TorchEngine(llama, store)
    _, chunk = generate(engine)
    store.path(chunk.object).unlink()
    spec = Spec.raw([chunk], "x", NAIVE, "<s>")
    reused = engine.link(spec)
    want = engine.link(replace(spec, documents=[plain(chunk)])).logits
    assert reused.logits is not None and want is not None and torch.equal(reused.logits, want)
    assert reused.linked is not None and reused.linked.parts[0].generated == ""  # so that no output is named by it


def test_equal_tokens_of_other_origin_keep_their_own_kv(llama: Model, store: Store) -> None:
    """Outputs of the same tokens, and a document that says the same, are as many objects in one prompt."""
    engine = TorchEngine(llama, store)
    by_tokens: dict[tuple[int, ...], list[Chunk]] = {}
    for word in "harbour festival numbers market winter tabs lines spring".split():
        chunk = generate(engine, count=1, tail=f"the {word}", temperature=0)[1]
        by_tokens.setdefault(chunk.tokens, []).append(chunk)
    one, two, *_ = max(by_tokens.values(), key=len)
    assert one.tokens == two.tokens

    def values(*documents: Chunk) -> list[Tensor]:
        linked = engine.link(Spec.raw(documents, "x", NAIVE, "<s>")).linked
        assert linked is not None
        return [linked.image.value(2)[0, :, start:end] for start, end in linked.image.layout.chunks]

    together = values(one, two, plain(one), one)
    alone = [value for document in (one, two, plain(one), one) for value in values(document)]
    assert all(map(torch.equal, together, alone))
    first, second, compiled, _ = alone
    assert not torch.equal(first, second) and not torch.equal(first, compiled)


def test_a_damaged_one_is_taken_out_and_its_tokens_are_compiled(llama: Model, tmp_path: Path) -> None:
    warnings: list[str] = []
    store = Store(tmp_path / "store", on_warning=warnings.append)
    engine = TorchEngine(llama, store)
    _, chunk = generate(engine)
    path = store.path(chunk.object)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    spec = replace(Spec.raw([chunk], "x", NAIVE, "<s>"), max_new_tokens=3)
    answer = answer_and_keep(engine, spec)
    assert answer.generated == engine.answer(replace(spec, documents=[plain(chunk)])).generated
    (warning,) = warnings
    assert "is compiled again" in warning and not path.exists()


def test_a_salt_is_part_of_its_name(store: Store) -> None:
    module = tiny.random_module(tiny.CONFIGS["llama"]())
    keys = {
        generate(TorchEngine(wrap_model(module, tiny.tokenizer(), salt=salt), store))[1].object
        for salt in ("", "b3b0c44298fc1c14", "9afbf4c8996fb924")
    }
    assert len(keys) == 3
    for key in keys:
        store.peek(key).close()  # checks that the key follows from the content


def test_what_the_model_has_no_position_for_is_not_kept(store: Store) -> None:
    module = tiny.random_module(tiny.CONFIGS["llama"]())
    module.config.max_position_embeddings = len(tiny.tokenizer().encode("<s>" + TAIL)) + 5
    engine = TorchEngine(wrap_model(module, tiny.tokenizer(), "short"), store)
    with pytest.raises(AssertionError):
        generate(engine)
    assert generate(engine, seam="")[1].object


def outputs(model: Model, store: Store, policy: str) -> tuple[list[str], list[Answer]]:
    answers: list[Answer] = []

    def keep(path: NodePath, answer: Answer) -> None:
        answers.append(answer)

    options = RunOptions(make_policy(policy), max_new_tokens=6, seed=3)
    executor = Executor(lambda name: TorchEngine(model, store), options, Hooks(on_answer=keep))
    query = g(plus(repeat(2, g("candidate", temperature=1.5)), "the harbour\n"), "Which?", temperature=0)
    return [done.object for done in executor.run(query).done], answers


def test_the_trace_of_an_outer_call_can_be_replayed(llama: Model, tmp_path: Path) -> None:
    """While the store has what it linked: nothing else is linked in its place."""
    store = Store(tmp_path / "own")
    keys, answers = outputs(llama, store, "naive")
    path = tmp_path / "judge.trace"
    answers[2].write_trace(path)
    trace = read_trace(path)
    assert [chunk.key for chunk in trace.chunks if chunk.key][:2] == keys[:2]
    assert np.array_equal(replay(llama, store, trace, "judge").rows, trace.rows)
    store.path(keys[0]).unlink()
    with pytest.raises(TraceError, match=keys[0][:12]):
        replay(llama, store, trace, "judge")


def test_an_outer_call_links_the_generated_objects_of_inner_ones(llama: Model, store: Store) -> None:
    (one, two, outer), answers = outputs(llama, store, "naive")
    assert one and two and one != two and not outer
    (first, _), judge = answers[0].link.layout.tail, answers[2]
    assert first >= 0
    image = judge.linked.image
    for key, (_, (start, end)) in zip((one, two), judge.linked.documents, strict=False):
        with store.peek(key) as file:
            values = np.frombuffer(file.layer(2)[1], dtype=np.float32).reshape(2, -1, 8)
        assert np.array_equal(values, image.value(2)[0, :, start:end].numpy())
    assert outputs(llama, store, "naive")[0] == [one, two, outer]
    assert outputs(llama, store, "legolink")[0][0] != one  # generated under another policy
    assert outputs(llama, store, "full")[0] == ["", "", ""]


DOCUMENT = "The harbour was quiet. It holds a festival in the spring; nobody knows why."


def kept(engine: TorchEngine, own_codec: str = "none", **spec: Any) -> tuple[str, bytes, bytes]:
    """The key of an output after a document, the bytes of its object, and the rows that were computed before it."""
    asked = replace(Spec.raw([Text(DOCUMENT)], TAIL, NAIVE, "<s>"), max_new_tokens=3, **spec)
    answer = answer_and_keep(engine, asked)
    key = keep_output(engine.store, answer, answer.generated.tokens, (), answer.generated.text, own_codec)
    assert key is not None
    return key, engine.store.path(key).read_bytes(), answer.linked.rows.tobytes()


def test_equal_names_mean_equal_kv(llama: Model, tmp_path: Path) -> None:
    """Its own codec, and the codec and context of the documents before it, are part of its name."""
    settings: list[dict[str, Any]] = [
        {}, {"codec": "int4"}, {"codec": "int8"}, {"after": "none"}, {"policy": make_policy("legolink", {"k": 2})},
        {"policy": FULL},
    ]  # fmt: skip
    by_key: dict[str, bytes] = {}
    for number, spec in enumerate(settings):
        for own_codec in ("none", "int4"):
            engine = TorchEngine(llama, Store(tmp_path / f"{number}-{own_codec}"))
            key, written, _ = kept(engine, own_codec, **spec)
            assert by_key.setdefault(key, written) == written
            assert kept(engine, own_codec, **spec)[:2] == (key, written)
    assert len(by_key) == 2 * len(settings)


def test_the_rows_that_were_computed_are_part_of_its_name(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy's name and fields need not tell which rows it computes, as of two versions of one."""
    outputs = []
    for k in (2, 3):
        first = partial(first_rows, k=k)
        monkeypatch.setattr(LegoLink, "select", lambda _, prompt, rows=first: Selection(rows(prompt.layout)))
        outputs.append(kept(TorchEngine(llama, Store(tmp_path / str(k))), policy=make_policy("legolink")))
    (one, _, rows), (other, _, other_rows) = outputs
    assert rows != other_rows and one != other
