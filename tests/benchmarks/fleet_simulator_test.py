"""The simulated fleet of `python -m benchmarks.fleet_simulator`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands.run import run_app

from benchmarks.fleet_simulator.__main__ import app
from benchmarks.fleet_simulator.simulator import (
    ROUTERS,
    Costs,
    Demand,
    Link,
    Prices,
    Replica,
    Requests,
    Residency,
    RoundRobin,
    Simulation,
    Site,
    compare,
    draw_requests,
    routing_for,
    size_fleet,
)
from pictool.controller.cost import Estimator
from pictool.errors import InputError
from pictool.routing import Routing

COSTS = Costs(Estimator(1e-5, 1e-3, 0.0), 0.1)
SITE = Site(8, 2e8, Link(5e9, 1e-4), Link(5e8, 0.03), 1000)
DEMAND = Demand(rate=40, requests=3000, objects=4000, documents=3, topic=8, drift_s=10, hot_s=5)


def drawn(demand: Demand = DEMAND) -> Requests:
    return draw_requests(demand, COSTS, SITE.token_bytes)


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    one, same, other = drawn(), drawn(), drawn(replace(DEMAND, seed=1))
    assert (one.documents == same.documents).all() and (one.arrivals == same.arrivals).all()
    assert (one.documents != other.documents).any()


def test_requests_are_of_one_topic_without_doubles_and_popular_ones_come_more_often() -> None:
    requests = drawn(replace(DEMAND, drift_s=0, hot_share=0))
    topics = requests.documents // DEMAND.topic
    assert (topics == topics[:, :1]).all()
    assert all(len(set(row)) == DEMAND.documents for row in requests.documents.tolist())
    counts = np.sort(np.bincount(topics[:, 0], minlength=500))[::-1]
    assert 1.5 < counts[0] / counts[1] < 2.7 and counts[:50].sum() > 0.55 * counts.sum()  # Zipf: 1/1, 1/2, …


def test_a_request_waits_for_its_objects_and_for_its_turn_by_hand() -> None:
    replica = Replica("a", replace(SITE, local=Link(1e6), remote=Link(1e5, 0.5)))
    first, overtaking, later = (
        replica.serve(10.0, [1, 2], [100_000, 100_000], 0.05),
        replica.serve(10.0, [1], [100_000], 0.3),
        replica.serve(20.0, [3], [100_000], 0.0),
    )
    assert [moved for _, moved in (first, overtaking, later)] == [200_000, 0, 100_000]
    assert first[0] == pytest.approx(10 + 2 * 0.5 + 2.0 + 0.2)  # the link, two objects after each other, the local tier
    assert overtaking[0] == pytest.approx(10 + 0.2 + 0.3)
    assert later[0] == pytest.approx(20 + 0.5 + 1 + 0.1)


def test_the_least_recently_used_objects_are_evicted_and_reported() -> None:
    replica = Replica("a", replace(SITE, cache_bytes=250))
    for number in (1, 2, 1, 3):
        replica.serve(0.0, [number], [100], 0.0)
    assert list(replica.held) == [1, 3] and replica.evicted == [2] and replica.num_bytes == 200


def test_all_routers_serve_all_requests_and_ours_moves_least() -> None:
    requests = drawn()
    outcomes = {one.router: one for one in compare(SITE, requests, routing_for(SITE, requests))}
    assert len(outcomes) == len(ROUTERS) and len({one.wanted_bytes for one in outcomes.values()}) == 1
    assert all(0 < one.moved_bytes <= one.wanted_bytes and one.ttft_p50 > 0 for one in outcomes.values())
    least = min(outcomes.values(), key=lambda one: one.moved_bytes)
    assert least.router == "residency"
    assert least.moved_bytes < 0.5 * outcomes["round robin"].moved_bytes
    even = outcomes["residency, even"]
    assert even.imbalance <= 1.5 and even.imbalance <= least.imbalance
    assert even.moved_bytes < 1.2 * least.moved_bytes


def test_a_fleet_of_one_is_the_same_under_every_router() -> None:
    requests = drawn()
    outcomes = compare(replace(SITE, replicas=1), requests, Routing())
    assert len({(one.moved_bytes, one.ttft_p99, one.imbalance) for one in outcomes}) == 1


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.label)
def test_requests_of_replicas_that_die_go_to_others(router: type) -> None:
    requests = drawn(replace(DEMAND, rate=150))
    site = replace(SITE, deaths_h=3600, rejoin_s=2)
    simulation = Simulation(site, requests, router, routing_for(site, requests))
    outcome = simulation.run()
    assert outcome.retried > 0
    assert (simulation._first_token > requests.arrivals).all()
    assert sum(simulation._router.queues.values()) == sum(len(one.running) for one in simulation._replicas.values())


def test_residency_is_what_replicas_report() -> None:
    requests = drawn()
    simulation = Simulation(replace(SITE, report_s=0.0), requests, Residency, routing_for(SITE, requests))
    simulation.run()
    router = simulation._router
    assert isinstance(router, Residency)
    simulation._advance(float(requests.arrivals[-1]) + 1)
    held = {(requests.names[number], name) for name, one in simulation._replicas.items() for number in one.held}
    assert {(key, name) for key, names in router._holders.items() for name in names} == held


def test_the_least_fleet_is_one_that_one_less_is_not() -> None:
    requests, target = drawn(), 0.3
    found = size_fleet(SITE, requests, Routing(), RoundRobin, target, Prices(2.0), 64)
    assert found.replicas is not None and found.replicas > 1
    p99 = [
        Simulation(replace(SITE, replicas=count), requests, RoundRobin, Routing()).run().ttft_p99
        for count in (found.replicas - 1, found.replicas)
    ]
    assert p99[0] > target >= p99[1]
    assert found.dollars_h == pytest.approx(2 * found.replicas, rel=0.01)
    assert size_fleet(SITE, requests, Routing(), RoundRobin, 1e-9, Prices(), 4).replicas is None


def test_demand_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="--documents 9"):
        replace(DEMAND, documents=9)


def test_the_command_prints_a_table_and_writes_what_it_was_asked(tmp_path: Path) -> None:
    options = ["--requests", 500, "--objects", 2000, "--replicas", 4, "--cache-gb", 5, "--rate", 4]
    report = run_app(app, *options, "--json", "-o", tmp_path / "out.json").json
    assert [one["router"] for one in report["results"]["routers"]] == [router.label for router in ROUTERS]
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert "residency" in run_app(app, *options).out
    assert run_app(app, "--far", "store").code == 2
    assert "add --measured" in run_app(app, *options, "--algo", "prefix").err
