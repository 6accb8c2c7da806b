"""These tests need the clients (`make test-clients`); elsewhere only the table is held against the docs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import save_scripted
from serve.live import END

from clients.table import ROOT, Client

NEWEST = Path(os.environ.get("PIC_CLIENTS", ROOT / ".venv-clients")).absolute() / "bin" / "python"
DOCUMENT = "The harbour was quiet. It holds a festival in the spring; nobody knows why, and few of them ask. " * 12
TEXT, THOUGHT, CALL = "Hello there, it is a harbour.", "Is it far?", {"at": "the harbour"}
collect_ignore_glob = [] if NEWEST.exists() else ["features_test.py", "recipes_test.py"]
REPLIES = {
    "hello without tools": [TEXT + END],
    "think without tools": [f"<think>{THOUGHT}</think>Not so far.{END}"],
    "look": [
        f'I look. <call>{{"name": "look", "arguments": {json.dumps(CALL)}}}</call>{END}', f"It is a red boat.{END}"
    ],
    "cut": ['<call>{"name": "look", "arguments": {"at": "over'],
}  # fmt: skip
Results = Callable[[Client], dict[str, Any]]
OUTCOMES: dict[str, dict[str, str]] = {}  # by client and feature


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if isinstance(item, pytest.Function) and item.originalname == "test_cell" and report.when == "call":
        parameters: Any = item.callspec.params
        client, feature = parameters["client"], parameters["feature"]
        outcome = client.cell(feature) if report.passed else "failed"
        OUTCOMES.setdefault(f"{client.name} {client.version}", {})[feature] = outcome
    return report


def pytest_sessionfinish() -> None:
    """Write the results to the file that PIC_CLIENTS_OUT names."""
    if OUTCOMES and (path := os.environ.get("PIC_CLIENTS_OUT")):
        cells = [outcome for features in OUTCOMES.values() for outcome in features.values()]
        counts = {outcome: cells.count(outcome) for outcome in sorted(set(cells))}
        results = {"command": "PIC_CLIENTS_OUT=FILE make test-clients", "cells": counts, "clients": OUTCOMES}
        Path(path).write_text(json.dumps(results, indent=1) + "\n")


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The address of an unmodified server."""
    command = [sys.executable, "-m", "pictool", "serve", "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            yield next(found[1] for line in process.stderr if (found := re.search(r"on (http://\S+)/v1", line)))
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model that says those texts."""
    model, store = save_scripted(tmp_path_factory.mktemp("said") / "model", REPLIES), tmp_path_factory.mktemp("store")
    with serving("-m", str(model), "--name", "said", "--store", str(store), "--check", "off") as address:
        yield address


@pytest.fixture(scope="session")
def results(url: str) -> Results:
    """What a client's driver reports, by feature."""
    body = {"model": "said", "text": DOCUMENT}
    given = {"url": url, "model": "said", "document": DOCUMENT}
    given["cache"] = httpx.post(f"{url}/v1/caches", json=body, timeout=60).json()["id"]
    keys = ("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(keys)}
    environment |= {
        "PIC_CLIENT": json.dumps(given),
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }

    @cache
    def run(driver: str, python: str) -> dict[str, Any]:
        name, *arguments = driver.split()
        program = "node" if name.endswith(".mjs") else python
        path = ROOT / "tests" / "clients" / "drivers" / name
        done = subprocess.run(
            [program, str(path), *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return lambda client: run(client.driver, sys.executable if client.is_apart else str(NEWEST))
