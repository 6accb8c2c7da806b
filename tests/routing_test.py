"""Which replica a request goes to (`pictool.routing`)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pictool.routing import RecentRequests, Residency, Routing, rank

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [f"key-{number}" for number in range(6)]
BY_BYTES = Routing(queue_bytes=0.0)
Sizes = dict[str, int]
Holders = dict[str, list[str]]
Queues = dict[str, float]

queues_of = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 20), min_size=1)
keys_of = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 1000))
residencies = st.dictionaries(st.sampled_from(KEYS), st.lists(st.sampled_from(NAMES), unique=True))
routings = st.builds(Routing, st.sampled_from([0.0, 1.0, 100.0]), st.sampled_from([1.0, 1.25, 2.0]))


def idle(names: list[str]) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


def backend(key: str, names: list[str]) -> str:
    """Where a cold object goes on an idle fleet."""
    return rank({key: 1}, {}, idle(names))[0]


@given(keys_of, residencies, queues_of, routings, st.randoms())
def test_every_replica_once_in_whatever_order_they_are_named(
    keys: Sizes, residency: Holders, queues: Queues, routing: Routing, random: Random
) -> None:
    ranked = rank(keys, residency, queues, routing)
    assert sorted(ranked) == sorted(queues)
    shuffled = dict(random.sample(list(queues.items()), len(queues)))
    turned = {key: list(reversed(names)) for key, names in residency.items()}
    assert rank(keys, turned, shuffled, routing) == ranked


@given(keys_of.filter(bool), residencies, queues_of, routings)
def test_scores_are_bytes_that_are_held_less_queues(
    keys: Sizes, residency: Holders, queues: Queues, routing: Routing
) -> None:
    residency = {key: [*residency.get(key, ()), next(iter(queues))] for key in keys}  # nothing is cold

    def score(name: str) -> float:
        held = sum(size for key, size in keys.items() if name in residency[key])
        return held - routing.queue_bytes * queues[name]

    scores = [score(name) for name in rank(keys, residency, queues, routing)]
    assert scores == sorted(scores, reverse=True)


@given(st.sampled_from(KEYS), queues_of, st.sampled_from([1.0, 1.25, 3.0]))
def test_a_cold_object_goes_to_no_replica_beyond_the_bound(key: str, queues: Queues, bound: float) -> None:
    best = rank({key: 1}, {}, queues, Routing(0.0, bound))[0]
    assert queues[best] < math.ceil(bound * (sum(queues.values()) + 1) / len(queues))


counts_of = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 400))


@given(keys_of, residencies, queues_of, routings, counts_of)
def test_a_replica_beyond_its_share_of_late_requests_comes_last(
    keys: Sizes, residency: Holders, queues: Queues, routing: Routing, served: dict[str, int]
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


# What a router knows of its replicas


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def known(*names: str, clock: Clock | None = None) -> Residency:
    made = Residency(Routing(1.0), sent_s=10.0, clock=clock or Clock())
    made.keep(names)
    return made


def test_the_replica_that_reports_most_bytes_is_first() -> None:
    residency, queues = known("a", "b", "c"), idle(["a", "b", "c"])
    residency.take_report("b", ["x"])
    residency.take_report("c", ["x", "y"])
    assert residency.order({"x": 100, "y": 50}, queues) == ["c", "b", "a"]
    assert residency.order({"x": 100, "y": 50}, queues | {"c": 51.0})[0] == "b"
    residency.take_report("c", [])
    assert residency.order({"x": 100}, queues)[0] == "b"


def test_what_was_sent_counts_until_it_is_reported_or_long_past_or_lost() -> None:
    clock = Clock()
    residency, queues = known("a", "b", "c", clock=clock), idle(["a", "b", "c"])
    home = residency.order({"x": 100}, queues)[0]
    other = next(name for name in queues if name != home)
    residency.was_sent(["x"], other)
    residency.take_report(other, [])
    assert residency.order({"x": 100}, queues)[0] == other
    clock.now = 11.0
    assert residency.order({"x": 100}, queues)[0] == home
    residency.was_sent(["y"], other)
    assert [*residency._sent_at[other]] == ["y"]  # what is past is forgotten
    residency.forget(other)
    assert not residency._sent_at[other]


def test_no_replica_gets_far_more_than_others_whatever_it_holds() -> None:
    residency, counts = known("a", "b", "c"), dict.fromkeys("abc", 0)
    residency.take_report("a", KEYS)
    for number in range(600):
        first = residency.order({KEYS[number % len(KEYS)]: 100}, idle(["a", "b", "c"]))[0]
        residency.was_sent([], first)
        counts[first] += 1
    assert max(counts.values()) <= 1.25 * 200 + 17


def test_a_replica_that_left_is_not_chosen_and_one_that_joined_is() -> None:
    residency = known("a", "b", "c")
    residency.take_report("b", ["x"])
    residency.keep(["a", "d"])
    assert residency.order({"x": 100}, idle(["a", "d"])) == rank({"x": 1}, {}, idle(["a", "d"]))


class Fleet:
    """Replicas that hold `held` objects each; six requests run at once, and after every 40 all replicas report."""

    def __init__(self, random: Random, replicas: int, held: int, *, in_turn: bool = False) -> None:
        self.tiers: dict[str, list[str]] = {f"{random.getrandbits(40):x}": [] for _ in range(replicas)}
        self.calls, self.fetched, self._held = Counter(dict.fromkeys(self.tiers, 0)), 0, held
        self._clock, self._running, self._in_turn = Clock(), list[str](), in_turn
        self._residency = Residency(Routing(queue_bytes=100.0), sent_s=10.0, clock=self._clock)
        self._residency.keep(self.tiers)

    def request(self, key: str) -> None:
        names, number = list(self.tiers), self.calls.total()
        queues = {name: float(self._running.count(name)) for name in names}
        name = names[number % len(names)] if self._in_turn else self._residency.order({key: 800}, queues)[0]
        tier = self.tiers[name]
        self.fetched += key not in tier
        tier[:] = [*(other for other in tier if other != key), key][-self._held :]
        self.calls[name] += 1
        self._residency.was_sent([key], name)
        self._running, self._clock.now = [*self._running, name][-5:], self._clock.now + 0.05
        if number % 40 == 39:
            for name, tier in self.tiers.items():
                self._residency.take_report(name, frozenset(tier))


@pytest.mark.parametrize("held", [100, 50])
def test_replicas_fetch_as_one_that_has_the_room_of_all_and_are_even_however_they_are_named(held: int) -> None:
    """250 objects once each, and 300 more requests by Zipf's law, over the names of 20 fleets."""
    fetched, keys = Counter[str](), [hashlib.sha256(bytes([number])).hexdigest() for number in range(250)]
    for seed in range(20):
        random = Random(seed)
        drawn = random.choices(keys, [1 / place for place in range(1, len(keys) + 1)], k=300)
        fleets = {
            "ours": Fleet(random, 3, held), "in turn": Fleet(random, 3, held, in_turn=True),
            "one": Fleet(random, 1, 3 * held),
        }  # fmt: skip
        for name, fleet in fleets.items():
            for key in keys + drawn:
                fleet.request(key)
            fetched[name] += fleet.fetched - len(keys)
        assert max(fleets["ours"].calls.values()) <= 1.5 * fleets["ours"].calls.total() / 3
    assert fetched["ours"] <= 1.02 * fetched["one"] + 20 and fetched["ours"] < 0.6 * fetched["in turn"], fetched
