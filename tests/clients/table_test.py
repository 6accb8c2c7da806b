"""The table of clients in the docs: that of `table.py`, at the locked versions, and each cell has its test."""

from __future__ import annotations

import ast
import json

import pytest

from clients.table import CLIENTS, FEATURES, ROOT, Client

DRIVERS = ROOT / "tests" / "clients" / "drivers"


def test_every_client_has_a_name_of_its_own() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_driver_reports_every_feature_that_the_table_has(client: Client) -> None:
    name, *_ = client.driver.split()
    source = (DRIVERS / name).read_text(encoding="utf-8")
    if client.is_npm:
        missing = [feature for feature in FEATURES if f" {feature}(" not in source and f" {feature}:" not in source]
    else:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        (report,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "report")
        missing = sorted(set(FEATURES) - {option.arg for option in report.keywords if option.arg})
    assert set(missing) <= client.hidden


def test_the_committed_results_are_those_of_the_table() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "clients.json").read_text())["clients"]
    assert found == {
        f"{client.name} {client.version}": {feature: client.cell(feature) for feature in FEATURES} for client in CLIENTS
    }


def test_the_committed_runs_of_agents_are_right() -> None:
    """The task is done by each agent, and nothing of a call that is none was run."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "agents.json").read_text())["runs"]
    agents = ("codex", "opencode chat", "opencode responses", "opencode messages", "aider")
    assert {(run["agent"], run["task"].split()[0]) for run in runs} == {
        (agent, task) for agent in agents for task in ("mend", "break", "cut")
    }
    for run in runs:
        assert run["mended"] == run["task"].startswith("mend"), run
        assert run["requests"] >= (4 if run["mended"] and run["agent"] != "aider" else 1), run
