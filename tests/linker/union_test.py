"""Unions of policies: the rows of all parts, or those of a shared budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import reference
import tiny
from subjects import (
    ARCHITECTURES,
    LENGTH_DEPENDENT,
    LENGTHS,
    Subject,
    default_policy,
    make_chunks,
    max_difference,
    parts_of,
    run,
    subject,
)

from pictool.errors import InputError
from pictool.linker.grid import label_of, parse_grid, parse_policy
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.policies.cacheblend import CacheBlend
from pictool.runtime.model import wrap_model
from pictool.store.store import Store


def rows_of(linked: Linked) -> set[int]:
    """The context rows that were computed at every layer."""
    return set(np.flatnonzero(linked.rows[:, : linked.image.layout.num_context].all(0)).tolist())


def by_score(linked: Linked) -> list[int]:
    """The rows that were computed, by their score."""
    scores = linked.scores
    assert scores is not None
    return sorted(rows_of(linked), key=lambda row: (-scores[row], row))


def by_place(linked: Linked, rows: set[int]) -> list[int]:
    """Rows by their place in their chunk."""
    starts = [start for start, _ in linked.image.layout.chunks]
    return sorted(rows, key=lambda row: (row - max(start for start in starts if start <= row), row))


def dealt(*ordered: list[int]) -> list[int]:
    """All rows of some lists, by the best place that any list gives them; of equal ones the earlier position."""
    place = {row: min(each.index(row) for each in ordered if row in each) for row in set().union(*ordered)}
    return sorted(place, key=lambda row: (place[row], row))


def link(policy: Policy, store: Store, architecture: str = "llama") -> Linked:
    return run(subject(architecture), store, policy, make_chunks(LENGTHS))


@pytest.mark.parametrize("parts", ["fixup-10+legolink-4", "fixup-5+legolink-1", "legolink-2+fixup-20+legolink-0:s=2"])
def test_a_union_computes_the_rows_of_all_parts(parts: str, store: Store) -> None:
    wanted = set().union(*(rows_of(link(parse_policy(part), store)) for part in parts.split("+")))
    linked = link(parse_policy(parts), store)
    assert rows_of(linked) == wanted
    assert np.array_equal(linked.rows, np.tile(linked.rows[0], (3, 1)))


def test_a_second_model_is_that_of_the_union(store: Store) -> None:
    speccache = default_policy("speccache")
    model = speccache.second_model
    named, hoisted = parse_grid(
        [f"speccache-15:spec_model={model}+legolink-3", f"legolink-3+speccache-15:spec_model={model}"]
    )
    assert named.policy.second_model == hoisted.policy.second_model == model
    assert rows_of(link(named.policy, store)) == rows_of(link(speccache, store)) | rows_of(
        link(parse_policy("legolink-3"), store)
    )


def test_a_shared_budget_takes_what_ranks_highest_under_any_part(store: Store) -> None:
    whole, shared = (link(parse_policy(spec), store) for spec in ("fixup-20+legolink-4", "fixup-20+legolink-4@15"))
    num_context = shared.image.layout.num_context
    assert len(rows_of(shared)) == int(np.ceil(0.15 * num_context))
    assert rows_of(shared) < rows_of(whole)
    # The reference: both parts deal in turn, best first; a tie goes to the earlier position.
    fixup, lego = (link(parse_policy(spec), store) for spec in ("fixup-20", "legolink-4"))
    best = dealt(by_score(fixup), by_place(lego, rows_of(lego)))
    assert rows_of(shared) == set(best[: len(rows_of(shared))])


BLEND = CacheBlend(ratio=0.1)


@cache
def deep_subject() -> Subject:
    """A model of 7 layers, 6 of which are checked."""
    module = tiny.random_module(type(tiny.CONFIGS["qwen3"]())(**{**tiny.SIZE, "num_hidden_layers": 7}))
    return Subject(wrap_model(module, tiny.tokenizer(), "deep"), reference.eager(module))


def require_blended(one: Subject, linked: Linked, join: Callable[[list[int], list[int]], list[int]]) -> None:
    """Compare with the dense reference of CacheBlend, whose rows those of others join at every checked layer."""
    num_context, ratios = linked.image.layout.num_context, BLEND.ratios(len(linked.rows))
    counts = {layer: math.ceil(round(ratio * num_context, 6)) for layer, ratio in ratios.items()}
    dense, rows, _ = reference.cacheblend(one.reference, parts_of(linked), counts, BLEND.on, join)
    assert np.array_equal(linked.rows, rows.numpy())
    assert max_difference(linked, dense) <= 1e-4


@pytest.mark.parametrize("beside", ["legolink-3", "fixup-10", "speccache-10", "fixup-5+legolink-2"])
@pytest.mark.parametrize("architecture", ["llama", "deep", "gemma3", "phi3-partial"])
def test_beside_a_policy_that_narrows_the_rows_of_the_others_stay_on(
    architecture: str, beside: str, store: Store
) -> None:
    one, chunks = deep_subject() if architecture == "deep" else subject(architecture), make_chunks(LENGTHS)
    second = default_policy("speccache").second_model if "speccache" in beside else ""
    other, both = (parse_policy(spec).with_default_model(second) for spec in (beside, f"cacheblend-10+{beside}"))
    static, linked = rows_of(run(one, store, other, chunks)), run(one, store, both, chunks)
    assert linked.rows[:2].all() and linked.rows[-1, sorted(static)].all()
    assert 0 < len(static) < linked.rows[-1, : linked.image.layout.num_context].sum()
    require_blended(one, linked, lambda chosen, on: sorted({*chosen, *static}))


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each not in LENGTH_DEPENDENT])
def test_beside_all_rows_nothing_is_narrowed(architecture: str, store: Store) -> None:
    """Rule 4, for a union of which one part computes everything."""
    for spec in ("cacheblend-10+fixup-100", "fixup-10+cacheblend-100"):
        linked = link(parse_policy(spec), store, architecture)
        exact = reference.full(subject(architecture).reference, sum(parts_of(linked), []))
        assert max_difference(linked, exact) <= 1e-4


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("legolink-2+prefix", "prefix reuses no objects"),
        ("cacheblend-5+cacheblend-10", "only one part may narrow"),
        ("fixup-5+cacheblend-10@8", "cacheblend shares no budget"),
        ("legolink-2+nonsense-3", "must be one of"),
        ("speccache-5:spec_model=a+speccache-9:spec_model=b", "two second models"),
        ("legolink-0:s=2+legolink-0:s=3", "dummy tokens"),
        ("legolink-2+legolink-4@200", "must be from 0 to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused_by_name(spec: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_policy(spec)


def test_a_second_model_in_the_parts_is_refused() -> None:
    """A server that lets clients name no model reads `second_model`: it must not be passed by."""
    with pytest.raises(InputError, match="spec_model, not in parts"):
        make_policy("union", {"parts": "legolink-2+speccache-5:spec_model=x"})


@pytest.mark.parametrize(
    ("spec", "labels"),
    [
        ("fixup-5+legolink-4", ["fixup-5+legolink-4"]),
        ("fixup:ratio=.02,.05+legolink:k=2,4",
         ["fixup-2+legolink-2", "fixup-2+legolink-4", "fixup-5+legolink-2", "fixup-5+legolink-4"]),
        ("cacheblend-15:layers=1+2+legolink-2", ["cacheblend-15:layers=1+2+legolink-2"]),
        ("fixup-5+speccache-5:spec_model=/m/a@10", ["fixup-5+speccache-5:spec_model=/m/a@10"]),
    ],
)  # fmt: skip
def test_specifications_of_unions(spec: str, labels: list[str]) -> None:
    grid = parse_grid([spec])
    assert [each.label for each in grid] == labels
    for each in grid:
        assert parse_policy(each.label) == each.policy == make_policy("union", each.policy.params)
        assert label_of(each.policy) == each.label


def as_field(spec: str) -> Policy:
    return make_policy("union", {"parts": spec})


@pytest.mark.parametrize("parse", [parse_policy, lambda spec: parse_grid([spec]), as_field])
def test_the_work_of_a_specification_is_bounded(parse: Callable[[str], object]) -> None:
    """A server parses what requests ask for: 50,000 parts took ten seconds."""
    parse("+".join(["fixup-5", *["legolink-4"] * 7]))
    for spec in ("+".join(["fixup-5"] * 9), "+".join(["fixup-5"] * 50_000), "fixup-5+" + "x" * 100_000):
        with pytest.raises(InputError) as refused:
            parse(spec)
        assert len(str(refused.value)) < 1500
