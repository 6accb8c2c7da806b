"""Plans of the vLLM connector, and the rows that policies select in them; without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import vllm_rig as rig

from pictool.api import compile, link
from pictool.core import Chunk
from pictool.engines.vllm.kv import KVHeads, ObjectReader
from pictool.engines.vllm.matching import Match
from pictool.engines.vllm.messages import LinkJob
from pictool.engines.vllm.planning import LinkPlan, Planner, make_plan
from pictool.engines.vllm.request import LinkRequest, ObjectRef
from pictool.engines.vllm.setup import parse_settings
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.runtime.model import Model
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
    ("objects", "message"),
    [
        ([], "no object"),
        ([rig.match("a", 5, 5)], "no object"),
        ([rig.match("a", 1, 2, 3)], "not those"),
        ([rig.match("a", 4, 4, 5, 6)], "not those"),
        ([rig.match("a", 0, 0, 1, 2), rig.match("b", 2, 2, 3)], "inside"),
        ([rig.match("a", 3, 3), rig.match("b", 1, 1)], "inside"),
    ],
)
def test_what_does_not_fit_is_refused(objects: list[Match], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_plan(NAIVE, rig.ids(*range(6)), objects)


# Rows of a policy that reads tables


@pytest.fixture
def planner(model: Model, store: Store) -> Iterator[Planner]:
    planner = Planner(parse_settings({"store": str(store.root)}), store, model)
    yield planner
    planner.close()


FIRST, SECOND, THIRD = rig.chunk(*range(5, 25)), rig.chunk(*range(30, 41)), rig.chunk(*range(50, 64))
HEAD, TAIL = (1, 70, 71), (80, 81)
FIXUP = make_policy("fixup", {"ratio": 0.2})


def request_of(policy: Policy, *objects: tuple[str, int]) -> LinkRequest:
    return LinkRequest(policy, tuple(ObjectRef(key, start) for key, start in objects))


def test_the_tables_of_the_objects_select_the_rows_that_the_torch_engine_selects(
    model: Model, store: Store, planner: Planner
) -> None:
    chunks = (FIRST, SECOND, THIRD)
    keys = [compiled.key for compiled in compile(model, store, chunks, probes=4)]
    head, tail = model.tokenizer.decode(HEAD), model.tokenizer.decode(TAIL)
    linked = link(model, store, chunks, tail, FIXUP, head=head)
    layout = linked.image.layout
    starts = (start for start, _ in layout.chunks)
    plan = planner.plan(request_of(FIXUP, *zip(keys, starts, strict=True)), layout.tokens)
    assert plan is not None and plan.layout.num_context == layout.num_context
    rows = planner.select(plan)
    assert rows is not None
    head_end = layout.head[1]
    assert np.array_equal(rows[head_end:], linked.rows[0][head_end : layout.num_context])
    assert 0 < rows[head_end:].sum() < 20
    assert rows[:head_end].all() == (plan.spans[0].key is None)


def test_tokens_without_an_object_and_the_end_of_one_that_is_cut(model: Model, store: Store, planner: Planner) -> None:
    """The gap is computed and takes nothing of the budget; the last token is vLLM's."""
    first, third = (compiled.key for compiled in compile(model, store, [FIRST, THIRD], probes=4))
    tokens = rig.ids(*HEAD, *FIRST.tokens, *SECOND.tokens, *THIRD.tokens)
    plan = planner.plan(request_of(FIXUP, (first, 3), (third, 34)), tokens)
    assert plan is not None and plan.num_context == len(tokens) - 1
    rows = planner.select(plan)
    assert rows is not None and rows[:3].all() and rows[23:34].all()
    assert rows[3:23].sum() + rows[34:].sum() == np.ceil(0.2 * plan.num_context)


def test_an_object_without_a_table_is_named_by_its_position(model: Model, store: Store, planner: Planner) -> None:
    ((first,), (second,)) = compile(model, store, [FIRST], probes=4), compile(model, store, [SECOND])
    tokens = rig.ids(*HEAD, *FIRST.tokens, *SECOND.tokens, *TAIL)
    plan = planner.plan(request_of(FIXUP, (first.key, 3), (second.key, 23)), tokens)
    assert plan is not None
    with pytest.raises(InputError, match="object at token 23 has no table"):
        planner.select(plan)
    fallback = make_policy("fixup", {"ratio": 0, "fallback": "legolink"})
    plan = planner.plan(request_of(fallback, (first.key, 3), (second.key, 23)), tokens)
    assert plan is not None and (rows := planner.select(plan)) is not None
    assert np.flatnonzero(rows).tolist() == [0, 1, 2, *range(23, 34)]


# Hits


def read_on_a_rank(model: Model, root: Path, plan: LinkPlan, rank: int) -> None:
    store, heads = Store(root), KVHeads.of_rank(model.geometry.kv_heads, rank, 2)
    with ObjectReader(store, model.target, LinkJob("a", plan, None, 0, ()), heads) as reader:
        assert all(len(reader.read(layer)) == 2 for layer in range(model.geometry.layers))
    store.counters.flush()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_linked_object_is_hit_once(model: Model, store: Store, is_named: bool) -> None:
    """Not when its table is read to select rows, when the ranks read its KV, or when it is checked after a failure."""
    head = Chunk("head", HEAD, "test")
    keys = [compiled.key for compiled in compile(model, store, [head, FIRST, SECOND], probes=4)]
    tokens = rig.ids(*HEAD, *FIRST.tokens, *SECOND.tokens, *TAIL)
    planner = Planner(parse_settings({"store": str(store.root), "min_tokens": 5}), store, model)
    request = request_of(FIXUP, (keys[1], 3), (keys[2], 23)) if is_named else LinkRequest(FIXUP, None)
    plan = planner.plan(request, tokens)
    assert plan is not None and [span.key for span in plan.spans] == keys
    assert planner.select(plan) is not None
    for rank in range(2):
        read_on_a_rank(model, store.root, plan, rank)
    planner.forget_damaged(plan)
    planner.close()
    store.counters.flush()
    assert store.hits() == dict.fromkeys(keys, 1)
