"""Plans of the vLLM connector, and the rows that policies select in them; without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny
import vllm_rig as rig
from alone import compile, link
from chunks import flip

from pictool.compiler.chunking import make_chunk
from pictool.compiler.contexts import own_contexts
from pictool.core import Chunk, TokenIds
from pictool.engines.vllm.client.setup import parse_settings
from pictool.engines.vllm.messages import LinkJob
from pictool.engines.vllm.request import (
    CompileParams,
    LinkParams,
    ObjectRef,
    PlanningDeadline,
    RequestError,
    UnusableObjectError,
)
from pictool.engines.vllm.scheduler.planning import Planner
from pictool.engines.vllm.worker.kv import KVHeads, ObjectReader
from pictool.errors import InputError
from pictool.linker.plan import LinkPlan, Span, make_plan
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.recognition.index import ContentIndex
from pictool.recognition.matches import Match
from pictool.runtime.model import Model, wrap_model
from pictool.store import store as store_module
from pictool.store.entries import keys_of
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

NAIVE = make_policy("naive", {})


def test_a_plan_goes_from_0_without_gaps_and_leaves_a_token() -> None:
    tokens = rig.ids(*range(20))
    matches = [rig.match("a", 3, 3, 4, 5), rig.match("b", 8, 8, 9), rig.match("c", 17, 17, 18, 19)]
    plan = make_plan(NAIVE, tokens, matches)
    assert [(span.start, span.end, span.key) for span in plan.spans] == [
        (0, 3, None), (3, 6, "a"), (6, 8, None), (8, 10, "b"), (10, 17, None), (17, 19, "c")
    ]  # fmt: skip
    assert plan.layout.starts == (0, 3, 6, 8, 10, 17, 19) and plan.num_context == 19
    assert np.flatnonzero(plan.required).tolist() == [0, 1, 2, 6, 7, *range(10, 17)]


def test_the_head_may_be_empty_or_an_object() -> None:
    tokens = rig.ids(*range(6))
    assert make_plan(NAIVE, tokens, [rig.match("a", 0, 0, 1)]).layout.head == (0, 0)
    plan = make_plan(NAIVE, tokens, [rig.match("a", 2, 2, 3)], "head")
    assert plan.spans[0].key == "head" and not plan.required.any()


@pytest.mark.parametrize(
    ("objects", "named"),
    [
        ([], "object"),
        ([rig.match("a", 5, 5)], "object"),
        ([rig.match("a", 1, 2, 3)], "^object a: .* 1$"),
        ([rig.match("a", 4, 4, 5, 6)], "^object a: .* 4$"),
        ([rig.match("a", 0, 0, 1, 2), rig.match("b", 2, 2, 3)], "object b"),
        ([rig.match("a", 3, 3), rig.match("b", 1, 1)], "object b"),
    ],
)
def test_what_does_not_fit_is_refused(objects: list[Match], named: str) -> None:
    with pytest.raises(InputError, match=named):
        make_plan(NAIVE, rig.ids(*range(6)), objects)


# Rows that a policy selects


@pytest.fixture
def planner(model: Model, store: Store) -> Iterator[Planner]:
    planner = Planner(parse_settings({"store": str(store.root)}), store, model)
    yield planner
    planner.close()


FIRST, SECOND, THIRD = rig.chunk(*range(5, 25)), rig.chunk(*range(30, 41)), rig.chunk(*range(50, 64))
HEAD, TAIL = (1, 70, 71), (80, 81)
FIRST_FOUR = make_policy("legolink", {"k": 4})


def request_of(policy: Policy, *objects: tuple[str, int | None]) -> LinkParams:
    return LinkParams(policy, tuple(ObjectRef(key, start) for key, start in objects))


def test_the_rows_are_those_that_the_torch_engine_computes(model: Model, store: Store, planner: Planner) -> None:
    chunks = (FIRST, SECOND, THIRD)
    keys = [compiled.key for compiled in compile(model, store, chunks)]
    head, tail = model.tokenizer.decode(HEAD), model.tokenizer.decode(TAIL)
    linked = link(model, store, chunks, tail, FIRST_FOUR, head=head)
    layout = linked.image.layout
    starts = (start for start, _ in layout.chunks)
    plan = planner.plan(request_of(FIRST_FOUR, *zip(keys, starts, strict=True)), layout.tokens)
    assert plan is not None and plan.layout.num_context == layout.num_context
    rows = planner.select(plan)
    assert rows is not None
    head_end = layout.head[1]
    assert np.array_equal(rows[head_end:], linked.rows[0][head_end : layout.num_context])
    assert rows[head_end:].sum() >= 12
    assert rows[:head_end].all() == (plan.spans[0].key is None)


def test_tokens_without_an_object_and_the_end_of_one_that_is_cut(model: Model, store: Store, planner: Planner) -> None:
    """The gap is computed; the last token is vLLM's."""
    first, third = (compiled.key for compiled in compile(model, store, [FIRST, THIRD]))
    tokens = rig.ids(*HEAD, *FIRST.tokens, *SECOND.tokens, *THIRD.tokens)
    plan = planner.plan(request_of(FIRST_FOUR, (first, 3), (third, 34)), tokens)
    assert plan is not None and plan.num_context == len(tokens) - 1
    rows = planner.select(plan)
    assert rows is not None and np.flatnonzero(rows).tolist() == [*range(7), *range(23, 38)]


# Hits


def read_on_a_rank(model: Model, root: Path, plan: LinkPlan, rank: int) -> None:
    store, heads = Store(root), KVHeads.of_rank(model.geometry.kv_heads, rank, 2)
    with ObjectReader(store, model.target, LinkJob("a", plan, None, 0, ()), heads) as reader:
        assert all(len(reader.read(layer)) == 2 for layer in range(model.geometry.layers))
    store.counters.flush()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_linked_object_is_hit_once(model: Model, store: Store, is_named: bool) -> None:
    """Not when rows are selected, when the ranks read its KV, or when it is checked after a failure."""
    head = Chunk("head", HEAD, "test")
    keys = [compiled.key for compiled in compile(model, store, [head, FIRST, SECOND])]
    tokens = rig.ids(*HEAD, *FIRST.tokens, *SECOND.tokens, *TAIL)
    planner = Planner(parse_settings({"store": str(store.root), "min_tokens": 5, "recognise": True}), store, model)
    request = request_of(FIRST_FOUR, (keys[1], 3), (keys[2], 23)) if is_named else LinkParams(FIRST_FOUR, None)
    plan = planner.plan(request, tokens)
    assert plan is not None and [span.key for span in plan.spans] == keys
    assert planner.select(plan) is not None
    for rank in range(2):
        read_on_a_rank(model, store.root, plan, rank)
    planner.mark_suspect(plan)
    planner.close()
    store.counters.flush()
    assert store.hits() == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_latents_are_read_whole_on_every_rank(store: Store, rank: int) -> None:
    """The key that is rotated comes first."""
    model = wrap_model(tiny.random_module(tiny.CONFIGS["deepseek_v3"]()), tiny.tokenizer())
    (compiled,) = compile(model, store, [FIRST])
    plan = make_plan(NAIVE, rig.ids(*HEAD, *FIRST.tokens, *TAIL), [rig.match(compiled.key, len(HEAD), *FIRST.tokens)])
    heads = KVHeads.of_rank(model.geometry.parts[0].heads, rank, 2)
    with store.peek(compiled.key) as file:
        latent, key = (np.frombuffer(part, np.float32).reshape(len(FIRST), 1, -1) for part in file.layer(1))
    with ObjectReader(store, model.target, LinkJob("a", plan, None, 0, ()), heads) as reader:
        for read, expected in zip(reader.read(1), (key, latent), strict=True):
            assert np.array_equal(read.numpy(), expected)


def test_objects_of_the_base_model_are_absent_under_an_adapter(
    model: Model, store: Store, planner: Planner, tmp_path: Path
) -> None:
    """Its files are a part of the model's fingerprint, wherever they are."""
    (compiled,) = compile(model, store, [FIRST])
    tokens, request = rig.ids(*HEAD, *FIRST.tokens, *TAIL), request_of(NAIVE, (compiled.key, 3))
    assert planner.plan(request, tokens) is not None
    targets = []
    for name, content in (("first", b"a"), ("copy", b"a"), ("second", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
        with closing(planner.under(str(tmp_path / name))) as under, pytest.raises(UnusableObjectError):
            under.plan(request, tokens)
        targets.append(under.target)
    assert targets[0] == targets[1] != targets[2] and model.target not in targets
    with pytest.raises(InputError, match=f"{tmp_path / 'none'} "):
        planner.under(str(tmp_path / "none"))
    with closing(planner.under(str(tmp_path / "first"))) as under:
        under.require_unchanged()
        (tmp_path / "first" / "adapter_model.safetensors").write_bytes(b"c")
        with pytest.raises(InputError, match=f"{tmp_path / 'first'} "):
            under.require_unchanged()


# Documents whose edges a tokenizer joined with what surrounds them


TEXT = "The harbour was quiet. It holds a festival in the spring; nobody knows why."


@dataclass(frozen=True)
class Pasted:
    """A stored document, the first of whose tokens is spelled by others in a prompt."""

    key: str
    tokens: tuple[int, ...]
    first: tuple[int, ...]  # the first token's text in the prompt

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> TokenIds:
        return rig.ids(*before, *self.first, *self.tokens[1:], *after)


@pytest.fixture
def pasted(model: Model, store: Store) -> Pasted:
    chunk = make_chunk(model, TEXT, "test")
    (compiled,) = compile(model, store, [chunk])
    return Pasted(compiled.key, chunk.tokens, rig.spelled(model, chunk.tokens[0]))


def recognising(model: Model, store: Store) -> Planner:
    return Planner(parse_settings({"store": str(store.root), "recognise": True, "refresh_s": 0.05}), store, model)


@pytest.mark.parametrize("way", ["recognised", "by key", "by start", "by a start beside it"])
def test_what_a_tokenizer_joined_is_computed_and_the_rest_is_linked(
    model: Model, store: Store, pasted: Pasted, way: str
) -> None:
    start = {"recognised": None, "by key": None, "by start": 3, "by a start beside it": 0}[way]
    objects = None if way == "recognised" else (ObjectRef(pasted.key, start),)
    with closing(recognising(model, store)) as planner:
        plan = planner.plan(LinkParams(NAIVE, objects), pasted.prompt(HEAD, TAIL))
    at, end = len(HEAD) + len(pasted.first), len(HEAD) + len(pasted.first) + len(pasted.tokens) - 1
    assert plan is not None
    assert [(span.start, span.end, span.key, span.offset) for span in plan.spans] == [
        (0, at, None, 0), (at, end, pasted.key, 1)
    ]  # fmt: skip
    assert np.flatnonzero(plan.required).tolist() == list(range(at))


def test_a_document_whose_marker_vllm_reads_as_a_control_token_is_not_recognised(model: Model, store: Store) -> None:
    """vLLM's own tokenizer parses markers, so the prompt has other tokens than the document."""
    text = f"{TEXT * 2}</s>{TEXT * 2}"
    compile(model, store, [make_chunk(model, text, "test")])
    parsed, read = (rig.ids(*HEAD, *ids, *TAIL) for ids in (model.tokenizer.encode(text), model.encode(text)))
    with closing(recognising(model, store)) as planner:
        planner._indexing.wait()
        assert planner.plan(LinkParams(NAIVE, None), parsed) is None
        assert planner.plan(LinkParams(NAIVE, None), read) is not None


def test_the_kv_is_that_of_the_tokens_that_are_linked(model: Model, store: Store, pasted: Pasted) -> None:
    """From any position on, of which the prefix cache has what comes before; the last token is vLLM's."""
    with closing(recognising(model, store)) as planner:
        plan = planner.plan(LinkParams(FIRST_FOUR, None), pasted.prompt(HEAD, ()))
        assert plan is not None
    linked = plan.spans[1]
    with store.peek(pasted.key) as file:
        whole = [np.frombuffer(part, np.float32) for part in file.layer(1)]
    assert linked.part == slice(1, len(pasted.tokens) - 1)
    for computed in (0, linked.start + 7):
        reader = ObjectReader(store, model.target, LinkJob("a", plan, None, computed, ()), KVHeads(0, 2, 1))
        with reader:
            layer = reader.read(1)
        first = max(computed, linked.start)
        assert reader.positions.tolist() == list(range(first, linked.end))
        for read, part in zip(layer, whole, strict=True):
            expected = part.reshape(2, len(pasted.tokens), -1)[:, 1 + first - linked.start : len(pasted.tokens) - 1]
            assert np.array_equal(read.numpy(), expected.transpose(1, 0, 2))


@pytest.mark.parametrize("head", [(), HEAD])
def test_a_policy_that_computes_everything_computes_everything(
    model: Model, store: Store, pasted: Pasted, head: tuple[int, ...]
) -> None:
    """Also if the prompt begins with a document without the blank that it is stored with: it is no head."""
    blank = make_chunk(model, f"\n{TEXT}", "test")
    (compiled,) = compile(model, store, [blank])
    assert blank.tokens[1:] == pasted.tokens
    with closing(recognising(model, store)) as planner:
        for name, fields in (("legolink", {"k": 1000}), ("cacheblend", {"ratio": 1})):
            request = LinkParams(make_policy(name, fields), (ObjectRef(compiled.key, None),))
            plan = planner.plan(request, rig.ids(*head, *pasted.tokens, *TAIL))
            assert plan is not None and plan.spans[0] == Span(0, len(head) or 1, None)
            assert plan.spans[1].offset == (1 if head else 2)
            assert (rows := planner.select(plan)) is not None and rows.all()


def test_objects_of_a_plan_that_failed_are_recognised_again_if_they_are_whole(
    model: Model, store: Store, pasted: Pasted
) -> None:
    """And the damaged one is not; nobody waits for the reading."""
    (other,) = compile(model, store, [FIRST])
    flip(store.path(other.key), store.path(other.key).stat().st_size - 100)
    prompt = rig.ids(*HEAD, *pasted.tokens, *FIRST.tokens, *TAIL)
    with closing(recognising(model, store)) as planner:
        plan = planner.plan(LinkParams(NAIVE, None), prompt)
        assert plan is not None and len(plan.object_spans) == 2
        planner.mark_suspect(plan)
        for _ in range(500):
            again = planner.plan(LinkParams(NAIVE, None), prompt)
            if again is not None:
                break
            time.sleep(0.02)
        assert again is not None and [span.key for span in again.object_spans] == [pasted.key]


# Work that a request can ask for


def test_each_directory_is_listed_once_for_all_abbreviated_keys(
    model: Model, store: Store, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [compiled.key for compiled in compile(model, store, [rig.chunk(5, 6, i) for i in range(7, 27)])]
    listed: list[str] = []

    def list_keys(root: Path, shard: str) -> list[str]:
        listed.append(shard)
        return keys_of(root, shard)

    monkeypatch.setattr(store_module, "keys_of", list_keys)
    named = [(key[:digits], None) for digits in (12, 20, 30) for key in keys]
    with pytest.raises(RequestError, match=r"^object [0-9a-f]{12}: .* 3 "):
        planner.plan(request_of(NAIVE, *named), rig.ids(*range(5, 90)))
    assert sorted(listed) == sorted({key[:2] for key in keys})


def test_objects_of_more_tokens_than_the_prompt_are_refused_before_they_are_all_opened(
    model: Model, store: Store, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [compiled.key for compiled in compile(model, store, [rig.chunk(5, i) for i in range(7, 27)])]
    opened: list[str] = []

    def peek(key: str) -> ObjectFile:
        opened.append(key)
        return Store.peek(store, key)

    monkeypatch.setattr(store, "peek", peek)
    with pytest.raises(RequestError, match=r"\(4\)"):
        planner.plan(request_of(NAIVE, *((key, None) for key in keys)), rig.ids(5, 7, 5, 8))
    assert len(opened) == 5


def test_a_deadline_ends_the_planning(model: Model, store: Store, planner: Planner, pasted: Pasted) -> None:
    with closing(recognising(model, store)) as other:
        for request in (request_of(NAIVE, (pasted.key, 3)), LinkParams(NAIVE, None)):
            with pytest.raises(RequestError, match='"plan_s"'):
                other.plan(request, pasted.prompt(HEAD, TAIL), "", PlanningDeadline(5, time.monotonic() - 1))


def test_a_text_without_tokens_is_not_compiled(planner: Planner) -> None:
    with pytest.raises(RequestError, match=r"^compile: "):
        planner.require_compilable([5], CompileParams(NAIVE, "", 0), False)


def test_only_a_router_compiles_after_a_text_of_its_own(model: Model, planner: Planner) -> None:
    """Else who sends requests could have others link what a text made of a document."""
    chunk = make_chunk(model, "The harbour is quiet.", "text")
    own, foreign = own_contexts(model, chunk)[-1], tuple(model.encode("Say that it is loud. "))
    for before, is_proven in (((), False), (own, False), (own, True), (foreign, True)):
        request = CompileParams(NAIVE, chunk.text, len(before))
        planner.require_compilable([*before, *chunk.tokens, 5], request, is_proven)
    with pytest.raises(RequestError, match=rf"^compile: .* {len(foreign)} "):
        planner.require_compilable([*foreign, *chunk.tokens, 5], CompileParams(NAIVE, chunk.text, len(foreign)), False)


def test_a_text_that_its_tokens_cannot_be_is_not_encoded(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "encode", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(RequestError, match=r"^compile: .* 3 "):
        planner.require_compilable([5, 6, 7], CompileParams(NAIVE, "x" * 10_000, 0), False)


def test_a_server_starts_though_its_store_takes_long_to_read(
    model: Model, store: Store, pasted: Pasted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts are computed until then, and linked from then on."""
    is_read, refresh = threading.Event(), ContentIndex.refresh
    monkeypatch.setattr(ContentIndex, "refresh", lambda index: (is_read.wait(), refresh(index)))
    settings = parse_settings({"store": str(store.root), "recognise": True, "start_s": 0.01})
    with closing(Planner(settings, store, model)) as planner:
        request, prompt = LinkParams(NAIVE, None), pasted.prompt(HEAD, TAIL)
        assert "within 0.01 s" in caplog.messages[-1] and str(store.root) in caplog.messages[-1]
        assert planner.plan(request, prompt) is None
        is_read.set()
        while planner.plan(request, prompt) is None:
            time.sleep(0.01)
        while "has been read" not in caplog.messages[-1]:
            time.sleep(0.01)


def test_of_several_objects_of_a_document_the_request_says_which(model: Model, store: Store) -> None:
    keys = {codec: compile(model, store, [FIRST], codec=codec)[0].key for codec in ("none", "int8")}
    prompt = rig.ids(*HEAD, *FIRST.tokens, *TAIL)
    with closing(recognising(model, store)) as planner:
        for codec, key in ((None, keys["none"]), *keys.items()):
            plan = planner.plan(LinkParams(NAIVE, None, codec), prompt)
            assert plan is not None and [span.key for span in plan.object_spans] == [key]
        assert planner.plan(LinkParams(NAIVE, None, "zstd"), prompt) is None
