"""Plans, rows, salts and recognition of the vLLM connector, without vLLM: against slow and plain re-computations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from pictool.api import compile, link
from pictool.compiler.compile import object_key
from pictool.core import Chunk, TokenIds
from pictool.engines.vllm.plan import Found, locate, make_plan
from pictool.engines.vllm.planner import Planner
from pictool.engines.vllm.recognise import Index, rolling_hashes
from pictool.engines.vllm.rows import RowSet
from pictool.engines.vllm.salt import Salter
from pictool.engines.vllm.settings import parse_settings
from pictool.engines.vllm.wanted import Place, Wanted, parse_policy, parse_wanted
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store

NAIVE = make_policy("naive", {})


def ids(*tokens: int) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)


def found(key: str, start: int, *tokens: int) -> Found:
    return Found(key, start, ids(*tokens))


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


def chunk(*tokens: int) -> Chunk:
    return Chunk(str(tokens), tokens, "test")


# Plans


def test_a_plan_goes_from_0_without_gaps_and_leaves_a_token() -> None:
    tokens = ids(*range(20))
    plan = make_plan(NAIVE, tokens, [found("a", 3, 3, 4, 5), found("b", 8, 8, 9), found("c", 17, 17, 18, 19)])
    assert [(span.start, span.end, span.key) for span in plan.spans] == [
        (0, 3, None), (3, 6, "a"), (6, 8, None), (8, 10, "b"), (10, 17, None), (17, 19, "c")
    ]  # fmt: skip
    assert plan.layout.starts == (0, 3, 6, 8, 10, 17, 19) and plan.reach == 19
    assert np.flatnonzero(plan.required).tolist() == [0, 1, 2, 6, 7, *range(10, 17)]


def test_the_head_may_be_empty_or_an_object() -> None:
    tokens = ids(*range(6))
    assert make_plan(NAIVE, tokens, [found("a", 0, 0, 1)]).layout.head == (0, 0)
    plan = make_plan(NAIVE, tokens, [found("a", 2, 2, 3)], "head")
    assert plan.spans[0].key == "head" and not plan.required.any()


@pytest.mark.parametrize(
    ("objects", "told"),
    [
        ([], "no object"),
        ([found("a", 5, 5)], "no object"),
        ([found("a", 1, 2, 3)], "not those"),
        ([found("a", 4, 4, 5, 6)], "not those"),
        ([found("a", 0, 0, 1, 2), found("b", 2, 2, 3)], "inside"),
        ([found("a", 3, 3), found("b", 1, 1)], "inside"),
    ],
)
def test_what_does_not_fit_is_refused(objects: list[Found], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make_plan(NAIVE, ids(*range(6)), objects)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 9))
def test_locating_is_looking_at_every_place(prompt: list[int], wanted: list[int], at: int) -> None:
    places = [i for i in range(at, len(prompt) - len(wanted) + 1) if prompt[i : i + len(wanted)] == wanted]
    try:
        start: int | None = locate("k", ids(*wanted), ids(*prompt), at).start
    except InputError:
        start = None
    assert start == (places[0] if places else None)


def test_bytes_of_two_tokens_are_no_token() -> None:
    with pytest.raises(InputError, match="not in the prompt"):
        locate("k", ids(0x01000000), ids(0, 1, 0), 0)


# Rows


@given(st.lists(st.lists(st.booleans(), max_size=30), min_size=1, max_size=4), st.integers(1, 12))
def test_pieces_are_the_rows_in_order(masks: list[list[bool]], limit: int) -> None:
    rows = RowSet.of([np.asarray(mask, dtype=bool) for mask in masks])
    want = [(owner, at) for owner, mask in enumerate(masks) for at, on in enumerate(mask) if on]
    assert list(zip(rows.owner.tolist(), rows.position.tolist(), strict=True)) == want
    seen: list[tuple[int, int]] = []
    for piece in rows.pieces(limit):
        mine = [
            (owner, at)
            for owner, start, end in zip(piece.owner.tolist(), piece.start.tolist(), piece.end.tolist(), strict=True)
            for at in range(start, end)
        ]
        assert mine == [want[i] for i in piece.index.tolist()] and len(mine) <= limit
        lengths = (piece.end - piece.start).tolist()
        assert lengths == sorted(lengths) and min(lengths) > 0
        before = dict(sorted(seen))
        assert all(before.get(owner, -1) < at for owner, at in mine), "a row before one of an earlier pass"
        seen += mine
    assert sorted(seen) == want


# Salts


def test_salts_tell_every_way_of_linking_apart() -> None:
    tokens, salter = ids(*range(20)), Salter()
    plans = [
        make_plan(policy, tokens, objects)
        for policy in (NAIVE, make_policy("legolink", {"k": 4}), make_policy("legolink", {"k": 5}))
        for objects in ([found("a", 3, 3, 4)], [found("b", 3, 3, 4)], [found("a", 3, 3, 4), found("a", 8, 8, 9)])
    ]
    salts = [salter.of(plan, own) for plan in plans for own in (None, "tenant")]
    assert len(set(salts)) == len(salts)
    assert salts == [salter.of(plan, own) for plan in plans for own in (None, "tenant")]
    assert salter.unique() != salter.unique()
    assert Salter().of(plans[0], None) != salts[0], "a client could name a salt"


# What requests and servers say


def test_what_a_request_may_say() -> None:
    assert parse_wanted(None, NAIVE, False) is None
    assert parse_wanted({"pic": False}, NAIVE, True) is None
    unsaid = parse_wanted({"other": 1}, NAIVE, True)
    assert unsaid is not None and unsaid.places is None and unsaid.policy == NAIVE
    said = parse_wanted({"pic": {"keys": ["ab"], "policy": "cacheblend-15"}}, NAIVE, False)
    assert said is not None and said.places is not None and said.places[0].start is None
    assert said.policy == make_policy("cacheblend", {})


def test_what_a_policy_may_be() -> None:
    assert parse_policy({"algo": "legolink", "k": 3}) == parse_policy("legolink-3")
    for wrong in (3, {"k": 3}, "legolink:k=1,2", {"algo": "legolink", "z": 1}, ""):
        with pytest.raises(InputError):
            parse_policy(wrong)


def test_what_a_server_may_be_told() -> None:
    settings = parse_settings({"store": "x"})
    assert (settings.recognise, settings.compile, settings.policy) == (False, False, make_policy("legolink", {}))
    for wrong in ({}, {"store": 1}, {"store": "x", "recognise": 1}, {"store": "x", "refresh_s": 0}, {"sotre": "x"}):
        with pytest.raises(InputError):
            parse_settings(wrong)


# Rows of a policy that reads tables


@pytest.fixture
def planner(model: Model, store: Store) -> Iterator[Planner]:
    one = Planner(parse_settings({"store": str(store.root)}), store, model)
    yield one
    one.close()


FIRST, SECOND, THIRD = chunk(*range(5, 25)), chunk(*range(30, 41)), chunk(*range(50, 64))
HEAD, TAIL = (1, 70, 71), (80, 81)
FIXUP = make_policy("fixup", {"ratio": 0.2})


def placed(policy: Policy, *at: tuple[str, int]) -> Wanted:
    return Wanted(policy, tuple(Place(key, start) for key, start in at))


def test_the_tables_of_the_objects_choose_the_rows_as_our_own_link_does(
    model: Model, store: Store, planner: Planner
) -> None:
    chunks = (FIRST, SECOND, THIRD)
    keys = [one.key for one in compile(model, store, chunks, probes=4)]
    head, tail = model.tokenizer.decode(HEAD), model.tokenizer.decode(TAIL)
    linked = link(model, store, chunks, tail, FIXUP, head=head)
    layout = linked.image.layout
    plan = planner.plan(placed(FIXUP, *zip(keys, (start for start, _ in layout.chunks), strict=True)), layout.tokens)
    assert plan is not None and plan.layout.num_context == layout.num_context
    rows = planner.select(plan)
    assert rows is not None
    behind = layout.head[1]
    assert np.array_equal(rows[behind:], linked.rows[0][behind : layout.num_context]) and 0 < rows[behind:].sum() < 20
    assert rows[:behind].all() == (plan.spans[0].key is None)


def test_tokens_without_an_object_and_the_end_of_one_that_is_cut(model: Model, store: Store, planner: Planner) -> None:
    """The gap is computed and takes nothing of the budget; the last token is vLLM's."""
    first, third = (one.key for one in compile(model, store, [FIRST, THIRD], probes=4))
    tokens = ids(*HEAD, *FIRST.tokens, *SECOND.tokens, *THIRD.tokens)
    plan = planner.plan(placed(FIXUP, (first, 3), (third, 34)), tokens)
    assert plan is not None and plan.reach == len(tokens) - 1
    rows = planner.select(plan)
    assert rows is not None and rows[:3].all() and rows[23:34].all()
    assert rows[3:23].sum() + rows[34:].sum() == np.ceil(0.2 * plan.reach)


def test_an_object_without_a_table_is_named_by_where_it_stands(model: Model, store: Store, planner: Planner) -> None:
    ((first,), (second,)) = compile(model, store, [FIRST], probes=4), compile(model, store, [SECOND])
    tokens = ids(*HEAD, *FIRST.tokens, *SECOND.tokens, *TAIL)
    plan = planner.plan(placed(FIXUP, (first.key, 3), (second.key, 23)), tokens)
    assert plan is not None
    with pytest.raises(InputError, match="object at token 23 has no table"):
        planner.select(plan)
    instead = make_policy("fixup", {"ratio": 0, "fallback": "legolink"})
    plan = planner.plan(placed(instead, (first.key, 3), (second.key, 23)), tokens)
    assert plan is not None and (rows := planner.select(plan)) is not None
    assert np.flatnonzero(rows).tolist() == [0, 1, 2, *range(23, 34)]


def test_rows_of_other_tables_are_told_apart() -> None:
    plan, salter = make_plan(FIXUP, ids(*range(9)), [found("a", 0, 0, 1, 2, 3)]), Salter()
    rows = np.eye(3, 8, dtype=bool)
    assert len({salter.of(plan, None, one) for one in (None, *rows)}) == 4
    assert salter.of(plan, None, rows[0]) == salter.of(plan, None, rows[0].copy())


# Recognition


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(1, 40))
def test_the_rolling_hash_is_that_of_each_window(tokens: list[int], window: int) -> None:
    if window > len(tokens):
        return
    base = 0x9E3779B97F4A7C15
    want = [
        sum((token + 1) * base**j for j, token in enumerate(tokens[i : i + window])) % 2**64
        for i in range(len(tokens) - window + 1)
    ]
    assert rolling_hashes(ids(*tokens), window).tolist() == want


def index_of(model: Model, store: Store, *chunks: Chunk, min_tokens: int = 2) -> Index:
    compile(model, store, chunks)
    index = Index(store, model.target, min_tokens)
    index.refresh()
    return index


def places(index: Index, *tokens: int) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in index.find(ids(*tokens), 0)]


def test_whole_chunks_are_found_the_longest_first_without_overlaps(model: Model, store: Store) -> None:
    index = index_of(
        model,
        store,
        chunk(5, 6, 7),
        chunk(5, 6, 7, 8),
        chunk(8, 9),
        chunk(
            3,
        ),
    )
    assert places(index, 1, 5, 6, 7, 8, 9, 5, 6, 7, 3) == [(1, 5), (6, 9)]
    assert places(index, 5, 6, 7, 9, 8, 9) == [(0, 3), (4, 6)]
    assert places(index, 5, 6) == places(index) == places(index, 3) == []


@given(st.lists(st.integers(3, 5), max_size=60))
def test_finding_is_looking_at_every_place(tokens: list[int]) -> None:
    """Every place of an object is taken by it, or by one that is as long at least."""
    known = [(3, 4, 5), (3, 3), (4, 4, 4, 4, 4), (5, 4, 3, 3, 4, 5, 3)]
    taken = places(_known(), *tokens)
    for start, end in taken:
        assert tuple(tokens[start:end]) in known
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    for one in known:
        for at in range(len(tokens) - len(one) + 1):
            if tuple(tokens[at : at + len(one)]) == one:
                over = [end - start for start, end in taken if start < at + len(one) and at < end]
                assert over and max(over) >= len(one)


_KNOWN: list[Index] = []


def _known() -> Index:
    if not _KNOWN:
        import tempfile

        model = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())
        store = Store(Path(tempfile.mkdtemp(prefix="pic-index-")))
        chunks = [chunk(3, 4, 5), chunk(3, 3), chunk(4, 4, 4, 4, 4), chunk(5, 4, 3, 3, 4, 5, 3)]
        _KNOWN.append(index_of(model, store, *chunks))
    return _KNOWN[0]


def test_equal_hashes_are_no_match(model: Model, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that is always the same, only the tokens decide."""
    import pictool.engines.vllm.recognise as module

    monkeypatch.setattr(
        module, "rolling_hashes", lambda tokens, window: np.zeros(len(tokens) - window + 1, dtype=np.uint64)
    )
    index = index_of(model, store, chunk(5, 6, 7), chunk(7, 6, 5))
    assert places(index, 5, 6, 8, 7, 6, 5, 6, 7) == [(3, 6)]


def test_the_index_follows_the_store(model: Model, store: Store) -> None:
    first, second = chunk(5, 6, 7), chunk(8, 9)
    index = index_of(model, store, first)
    compile(model, store, [second])
    assert places(index, 5, 6, 7, 8, 9) == [(0, 3)]
    index.refresh()
    assert places(index, 5, 6, 7, 8, 9) == [(0, 3), (3, 5)]
    store.path(object_key(model, first)).unlink()
    index.refresh()
    assert places(index, 5, 6, 7, 8, 9) == [(3, 5)]
    index.forget(object_key(model, second))
    assert places(index, 5, 6, 7, 8, 9) == []


def test_objects_of_another_model_are_not_found(model: Model, store: Store) -> None:
    other = wrap_model(tiny.random_module(tiny.CONFIGS["llama"](), seed=1), tiny.tokenizer())
    compile(other, store, [chunk(5, 6, 7)])
    assert places(index_of(model, store, chunk(8, 9)), 5, 6, 7, 8, 9) == [(3, 5)]
