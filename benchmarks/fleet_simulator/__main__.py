"""`python -m benchmarks.fleet_simulator`: how requests are routed in a fleet that is simulated."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.bench import command_line, print_table
from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json, write_json
from pictool.commands.console.progress import progress
from pictool.commands.console.verbosity import note
from pictool.commands.linking.request import note_measuring
from pictool.commands.settings.options import OUTPUT, JsonOption, command, make_app, option
from pictool.commands.settings.resources import open_model
from pictool.commands.settings.settings import Settings, read_yaml
from pictool.errors import InputError

if TYPE_CHECKING:
    from benchmarks.fleet_simulator.simulator import Costs, Demand, FleetSize, Link, Outcome, Prices, Site
    from pictool.runtime.model import Model

app = make_app()
DEMAND, FLEET = "Prompt", "Cluster"
# What is stated if no model is measured: an example of an 8B model on one data-center GPU. Yours differs.
_TOKEN_BYTES = 131_072
_TOKEN_S, _CONSTANT_S, _PAIR_S = 3e-5, 5e-3, 1e-9
_TIERS = Path(__file__).with_name("tiers.yaml")
_MOST_REPLICAS = 4096


@dataclass(frozen=True)
class RouteOptions:
    """What a command line says of a fleet and its load."""

    replicas: Annotated[int, option("--replicas", "N", "Of the fleet.", FLEET, min=1, max=_MOST_REPLICAS)] = 64
    cache_gb: Annotated[float, option("--cache-gb", "GB", "Of each replica's local tier.", FLEET, min=0.001)] = 500.0
    local: Annotated[str, option("--local", "TIER", "Where replicas keep objects.", FLEET)] = "nvme"
    far: Annotated[str, option("--far", "TIER", "Where all objects are.", FLEET)] = "object-store"
    tiers: Annotated[Optional[str], option("--tiers", "FILE", "Tiers, in the form of tiers.yaml here.", FLEET)] = None
    deaths: Annotated[float, option("--deaths", "N", "Replicas that die in an hour.", FLEET, min=0)] = 0.0
    price: Annotated[float, option("--price", "USD", "Of a replica an hour.", FLEET, min=0)] = 2.5
    target: Annotated[
        Optional[float], option("--target", "S", "Find the least fleets with this p99 of TTFT.", FLEET, min=0.001)
    ] = None
    rate: Annotated[float, option("--rate", "R", "Requests a second.", DEMAND, min=0.001)] = 60.0
    requests: Annotated[int, option("--requests", "N", "In all.", DEMAND, min=100)] = 100_000
    objects: Annotated[int, option("--objects", "N", "Documents that there are.", DEMAND, min=2)] = 1_000_000
    documents: Annotated[int, option("--documents", "N", "Of a request.", DEMAND, min=1)] = 4
    topic: Annotated[int, option("--topic", "N", "Documents of a topic; a request has one.", DEMAND, min=1)] = 16
    tokens: Annotated[int, option("--tokens", "N", "Of a document, on average.", DEMAND, min=16)] = 512
    skew: Annotated[float, option("--skew", "S", "Exponent of Zipf's law over topics.", DEMAND, min=0)] = 1.0
    drift: Annotated[
        float, option("--drift", "S", "Every S seconds the first topic becomes the last.", DEMAND, min=0)
    ] = 60.0
    hot: Annotated[float, option("--hot", "SHARE", "Of requests for one topic; it changes.", DEMAND, min=0, max=1)] = (
        0.05
    )
    measured: Annotated[
        bool, option("--measured", None, "Costs of -m on this machine, not those of the example.", FLEET)
    ] = False
    policy: Annotated[str, option("--algo", "SPEC", "How prompts are linked.", FLEET)] = "legolink-16"
    seed: Annotated[int, option("--seed", "N", "Of the requests.", DEMAND, min=0)] = 0
    output: Annotated[Optional[str], option("-o, --output", "FILE", "Write it as JSON.", OUTPUT)] = None
    as_json: JsonOption = False


@command(app, "route", "model", "device", "dtype")
def run_route(options: RouteOptions, settings: Settings) -> None:
    """Compare routers of requests in a simulated fleet.

    \b
      python -m benchmarks.fleet_simulator --replicas 1000 --rate 900 --deaths 60
      python -m benchmarks.fleet_simulator --rate 60 --target 1.0
    """
    from benchmarks.fleet_simulator.simulator import ROUTERS, compare, draw_requests, report, routing_for, size_fleet

    site, costs, prices = make_site(options, settings)
    demand = make_demand(options)
    requests = draw_requests(demand, costs, site.token_bytes)
    routing = routing_for(site, requests)
    with progress("simulating", len(ROUTERS)) as advance:
        outcomes = compare(site, requests, routing, on_done=advance)
    fleets = []
    if options.target is not None:
        with progress("sizing", len(ROUTERS)) as advance:
            for router in ROUTERS:
                most = _MOST_REPLICAS
                fleets.append(size_fleet(site, requests, routing, router, options.target, prices, most))
                advance()
    written = make_report(options, site, costs, demand, report(outcomes, fleets))
    if options.output is not None:
        write_json(options.output, written)
        note(f"wrote {options.output}")
    if options.as_json:
        print_json(written)
    else:
        print_outcomes(options, outcomes, fleets)


def make_demand(options: RouteOptions) -> Demand:
    from benchmarks.fleet_simulator.simulator import Demand

    return Demand(
        options.rate, options.requests, options.objects, options.documents, options.topic, options.tokens,
        skew=options.skew, drift_s=options.drift, hot_share=options.hot, seed=options.seed,
    )  # fmt: skip


def make_site(options: RouteOptions, settings: Settings) -> tuple[Site, Costs, Prices]:
    """The fleet, what a link costs there, and prices. Raises UsageError, InputError."""
    from benchmarks.fleet_simulator.simulator import Costs, Prices, Site
    from pictool.controller.cost import Estimator

    listed = read_tiers(options.tiers)
    for flag, name in (("--local", options.local), ("--far", options.far)):
        if name not in listed:
            raise UsageError(f"{flag} {name}: must be a tier: {', '.join(listed)}")
    if options.measured:
        token_bytes, costs = _measured(options, settings)
    else:
        token_bytes = _TOKEN_BYTES
        estimator = Estimator(_TOKEN_S, _CONSTANT_S, _PAIR_S)
        costs = Costs(estimator, _stated_share(options))
    site = Site(
        options.replicas, options.cache_gb * 1e9, _link(listed[options.local]), _link(listed[options.far]), token_bytes,
        options.deaths,
    )  # fmt: skip
    return site, costs, Prices(options.price, float(listed[options.far]["price_gb_month"]))


def read_tiers(name: str | None) -> dict[str, dict[str, Any]]:
    """The tiers of a file, or the examples, by their names."""
    return {tier["name"]: tier for tier in read_yaml(Path(name) if name else _TIERS, ("tiers",))["tiers"]}


def _link(tier: dict[str, Any]) -> Link:
    from benchmarks.fleet_simulator.simulator import Link

    return Link(tier["read_gb_s"] * 1e9, tier.get("latency_ms", 0.0) / 1e3)


def _stated_share(options: RouteOptions) -> float:
    """The share of context tokens that a policy computes, as far as its name tells."""
    from pictool.linker.grid import parse_policy

    policy = parse_policy(options.policy)
    if policy.knob is not None and policy.knob.is_share:
        return float(policy.params[policy.knob.field])
    if "k" in policy.params:
        return min(1.0, float(policy.params["k"]) / options.tokens)
    if policy.name in ("full", "naive"):
        return float(policy.name == "full")
    raise InputError(f"--algo {options.policy}: what it computes is not known without a model; add --measured")


def _measured(options: RouteOptions, settings: Settings) -> tuple[int, Costs]:
    from benchmarks.fleet_simulator.simulator import Costs
    from pictool.controller.profile import make_estimator
    from pictool.linker.grid import parse_policy

    model, policy = open_model(settings), parse_policy(options.policy)
    estimator = make_estimator(model, policy, on_measure=note_measuring)
    has_ratio = policy.knob is not None and policy.knob.is_share
    return model.token_bytes, Costs(estimator, _stated_share(options) if has_ratio else _static_share(model, options))


def _static_share(model: Model, options: RouteOptions) -> float:
    """The share of context rows that a policy without a ratio computes, of alike chunks after a head of one token.

    Raises:
        InputError: the share depends on what documents and prompts say.
    """
    from pictool.core import Layout
    from pictool.linker.grid import parse_policy
    from pictool.linker.policies.base import Prompt

    policy, context = parse_policy(options.policy), options.documents * options.tokens
    if policy.needs.attention or policy.needs.runs_model or policy.check_layers(model.geometry.layers):
        raise InputError(f"--algo {options.policy}: its rows depend on what documents say; simulate a fixed share")
    bounds = [1 + round(i * (context - 1) / options.documents) for i in range(options.documents + 1)]
    layout = Layout.of([0], [[0] * (end - start) for start, end in itertools.pairwise(bounds)], [0])
    return float(policy.select(Prompt(model, layout, ())).rows[:context].mean())


def make_report(options: RouteOptions, site: Site, costs: Costs, demand: Demand, results: Any) -> dict[str, Any]:
    from pictool.runtime.machine import machine

    return {
        "bench": "route", "command": command_line(), "machine": machine(), "demand": asdict(demand),
        "site": asdict(site), "costs": asdict(costs), "policy": options.policy, "target_s": options.target,
        "price_replica_h": options.price, "results": results,
    }  # fmt: skip


def print_outcomes(options: RouteOptions, outcomes: list[Outcome], fleets: list[FleetSize]) -> None:
    print(
        f"{options.replicas:,d} replicas with {options.cache_gb:g} GB each ({options.local}), {options.objects:,d} "
        f"objects ({options.far}); {options.requests:,d} requests at {options.rate:g} a second, "
        "of which the first half warms up"
    )
    columns = ["router", "TB moved", "hit rate", "TTFT p50", "p99 s", "most / mean", "busy", "retried", "choosing us"]
    print_table(columns, [_row(outcome) for outcome in outcomes])
    if fleets:
        print(f"the least fleet with a p99 of at most {options.target:g} s, and what it costs with the remote")
        print_table(["router", "replicas", "USD an hour"], [_fleet_row(fleet) for fleet in fleets])


def _row(outcome: Outcome) -> list[str]:
    return [
        outcome.router, f"{outcome.moved_bytes / 1e12:,.2f}", f"{outcome.hit_rate:.1%}", f"{outcome.ttft_p50:.3f}",
        f"{outcome.ttft_p99:.3f}", f"{outcome.imbalance:.2f}", f"{outcome.utilisation:.1%}", f"{outcome.retried:,d}",
        f"{outcome.choose_s * 1e6:,.0f}",
    ]  # fmt: skip


def _fleet_row(fleet: FleetSize) -> list[str]:
    if fleet.replicas is None or fleet.dollars_h is None:
        return [fleet.router, f"more than {_MOST_REPLICAS}", "-"]
    return [fleet.router, f"{fleet.replicas:,d}", f"{fleet.dollars_h:,.2f}"]


if __name__ == "__main__":
    app()
