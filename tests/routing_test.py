"""Which replica a request goes to (`pictool.routing`)."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pictool.routing import RecentRequests, Routing, rank

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [f"key-{number}" for number in range(6)]
BY_BYTES = Routing(queue_bytes=0.0)
Sizes = dict[str, int]
Residency = dict[str, list[str]]
Queues = dict[str, float]

replicas = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
queues_of = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 20), min_size=1)
wanted = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 1000))
residencies = st.dictionaries(st.sampled_from(KEYS), st.lists(st.sampled_from(NAMES), unique=True))
routings = st.builds(Routing, st.sampled_from([0.0, 1.0, 100.0]), st.sampled_from([1.0, 1.25, 2.0]))


def idle(names: list[str]) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


def backend(key: str, names: list[str]) -> str:
    """Where a cold object goes on an idle fleet."""
    return rank({key: 1}, {}, idle(names))[0]


@given(wanted, residencies, queues_of, routings, st.booleans(), st.randoms())
def test_every_replica_once_in_whatever_order_they_are_named(
    keys: Sizes, residency: Residency, queues: Queues, routing: Routing, is_chain: bool, random: Random
) -> None:
    ranked = rank(keys, residency, queues, routing, is_chain=is_chain)
    assert sorted(ranked) == sorted(queues)
    shuffled = dict(random.sample(list(queues.items()), len(queues)))
    turned = {key: list(reversed(names)) for key, names in residency.items()}
    assert rank(keys, turned, shuffled, routing, is_chain=is_chain) == ranked


@given(wanted.filter(bool), residencies, queues_of, routings)
def test_scores_are_bytes_that_are_held_less_queues(
    keys: Sizes, residency: Residency, queues: Queues, routing: Routing
) -> None:
    residency = {key: [*residency.get(key, ()), next(iter(queues))] for key in keys}  # nothing is cold

    def score(name: str) -> float:
        held = sum(size for key, size in keys.items() if name in residency[key])
        return held - routing.queue_bytes * queues[name]

    scores = [score(name) for name in rank(keys, residency, queues, routing)]
    assert scores == sorted(scores, reverse=True)


@given(wanted.filter(bool), residencies, replicas)
def test_the_longest_resident_prefix_of_a_chain_counts(keys: Sizes, residency: Residency, names: list[str]) -> None:
    def prefix(name: str) -> int:
        total = 0
        for key, size in keys.items():
            if name not in residency.get(key, ()):
                break
            total += size
        return total

    best = rank(keys, residency, idle(names), is_chain=True)[0]
    assert prefix(best) == max(map(prefix, names))


@given(st.sampled_from(KEYS), queues_of, st.sampled_from([1.0, 1.25, 3.0]))
def test_a_cold_object_goes_to_no_replica_beyond_the_bound(key: str, queues: Queues, bound: float) -> None:
    best = rank({key: 1}, {}, queues, Routing(0.0, bound))[0]
    assert queues[best] < math.ceil(bound * (sum(queues.values()) + 1) / len(queues))


counts_of = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 400))


@given(wanted, residencies, queues_of, routings, counts_of)
def test_a_replica_beyond_its_share_of_late_requests_comes_last(
    keys: Sizes, residency: Residency, queues: Queues, routing: Routing, served: dict[str, int]
) -> None:
    """Those within it are ordered as ever, apart from what is cold."""
    counts = {name: served.get(name, 0) for name in queues}
    most = routing.bound * sum(counts.values()) / len(counts) + routing.lead
    ranked = rank(keys, residency, queues, routing, served=counts)
    is_over = [counts[name] >= most for name in ranked]
    assert is_over == sorted(is_over)
    held = {key: [*names, *queues] for key, names in residency.items()}
    within = [name for name in rank(keys, held, queues, routing) if counts[name] < most]
    again = rank(keys, held, queues, routing, served=counts)
    assert not set(keys) <= set(held) or again[: len(within)] == within


def test_late_requests_are_counted_evenly() -> None:
    served = RecentRequests(window=10)
    served.keep(["a", "b"])
    for _ in range(300):
        served.add("a")
        served.add("b")
        served.add("b")
    assert 20 <= sum(served.counts.values()) <= 40
    assert served.counts["b"] / served.counts["a"] == pytest.approx(2, rel=0.1)
    served.keep(["b", "c"])
    assert served.counts.keys() == {"b", "c"} and 10 <= served.counts["c"] <= 20


def test_backends_stay_where_they_are_if_another_replica_leaves_or_joins() -> None:
    keys, rest = [f"document-{number}" for number in range(2000)], NAMES[1:]
    before, after = ({key: backend(key, names) for key in keys} for names in (NAMES, rest))
    moved = [key for key in keys if before[key] != after[key]]
    assert moved == [key for key in keys if before[key] == NAMES[0]]
    assert len(keys) / 8 * 0.8 < len(moved) < len(keys) / 8 * 1.2


def test_backends_follow_weights() -> None:
    weights, count = {"small": 1.0, "large": 3.0}, 4000
    backends = Counter(
        rank({f"document-{number}": 1}, {}, idle(["small", "large"]), weights=weights)[0] for number in range(count)
    )
    assert abs(backends["large"] / count - 0.75) < 5 * math.sqrt(0.75 * 0.25 / count)


def test_a_hot_object_spreads_once_waiting_costs_more_than_fetching() -> None:
    residency, routing = {"hot": ["a"]}, Routing(queue_bytes=10.0)
    firsts = [rank({"hot": 35}, residency, {"a": queue, "b": 0, "c": 0}, routing)[0] for queue in range(6)]
    assert firsts[:4] == ["a"] * 4 and "a" not in firsts[4:]


def test_of_equals_the_holder_of_more_bytes_and_of_holders_the_shorter_queue() -> None:
    residency = {"x": ["a", "b"], "y": ["b", "c"]}
    assert rank({"x": 5, "y": 3}, residency, idle(["a", "b", "c"]), BY_BYTES) == ["b", "a", "c"]
    assert rank({"x": 5}, residency, {"a": 2, "b": 1, "c": 0}, Routing(1.0))[:2] == ["b", "a"]


def test_a_dead_replica_holds_nothing_and_no_replica_gives_none() -> None:
    assert rank({"x": 5}, {"x": ["gone"]}, idle(NAMES)) == rank({"x": 5}, {}, idle(NAMES))
    assert rank({"x": 5}, {"x": ["gone"]}, {}) == []


def test_a_request_without_documents_goes_to_the_shortest_queue() -> None:
    assert rank({}, {"x": ["a"]}, {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("key", "order"),
    [("0" * 64, "17563402"), ("f" * 64, "12754603")],
)
def test_hashes_are_the_same_everywhere(key: str, order: str) -> None:
    """Several processes route, and agree: these orders must never change."""
    assert "".join(name[-1] for name in rank({key: 1}, {}, idle(NAMES))) == order
