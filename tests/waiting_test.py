"""Tests wait for events, with limits of a minute or more: a busy machine is slow, and nothing is wrong with it then.

A limit below a second is one that is meant to be reached; so is one whose line says `may be reached`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LEAST_S = 60
WAITS = {
    "wait",
    "join",
    "acquire",
    "result",
    "wait_procs",
    "alarm",
    "communicate",
    "settimeout",
    "wait_for",
}  # their argument
AFTER_ANOTHER = {"wait_for": 1, "wait": 1}  # whose argument may come after another: asyncio's, concurrent.futures'
CLIENTS = {"httpx", "httpx2"}  # whose limit is five seconds, if none is named
REQUESTS = {"get", "post", "put", "delete", "head", "options", "patch", "request", "stream", "Client", "AsyncClient"}
NAMES = ("wait", "limit", "timeout", "patience")  # constants in seconds: _WAIT_S


def problems(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a test that wait too little, and what is wrong with them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            options = {option.arg: option.value for option in node.keywords}
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            limits = [options["timeout"]] if "timeout" in options else places(node.args, name)
            if any(1 <= value < LEAST_S for value in map(number, limits)):
                yield node.lineno, f"{name}: wait {LEAST_S} s or more"
            if name in REQUESTS and module(node.func) in CLIENTS and not {"timeout", "transport"} & set(options):
                yield node.lineno, f"{name}: name a timeout; without one it is 5 s"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            is_clock = isinstance(node.left, ast.Call) and getattr(node.left.func, "attr", "") == "monotonic"
            if is_clock and 1 <= number(node.right) < LEAST_S:
                yield node.lineno, f"monotonic() + …: wait {LEAST_S} s or more"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.endswith("_S") and name.lower().strip("_").startswith(NAMES) and 1 <= number(node.value) < LEAST_S:
                yield node.lineno, f"{name}: wait {LEAST_S} s or more"


def places(arguments: list[ast.expr], name: str) -> list[ast.expr]:
    """The arguments of a call without `timeout=` that may be its limit."""
    return arguments[: 1 + AFTER_ANOTHER.get(name, 0)] if name in WAITS else []


def number(node: ast.expr) -> float:
    """A literal number; 0 for anything else."""
    value = node.value if isinstance(node, ast.Constant) else 0
    return value if isinstance(value, int | float) else 0


def module(function: ast.expr) -> str:
    owner = function.value if isinstance(function, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else ""


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("event.wait(5)", True), ("asyncio.wait_for(task, 10)", True), ("spy.wait_for(lambda: 3, LIMIT)", False),
        ("thread.join(timeout=5)", True), ("httpx.get(url)", True), ("httpx.Client()", True),
        ("until = time.monotonic() + 30", True), ("_WAIT_S = 20.0", True), ("signal.alarm(20)", True),
        ("event.wait(60)", False), ("httpx.get(url, timeout=60)", False), ("', '.join(names)", False),
        ("client.post(url, timeout=0.3)", False), ("process.wait()", False), ("cache.get(5)", False),
    ],
)  # fmt: skip
def test_what_waits_too_little_is_found(source: str, is_found: bool) -> None:
    assert bool(list(problems(source))) == is_found


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_tests_wait_for_a_minute(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found = [
        f"{path.name}:{line}: {what}" for line, what in problems(source) if "may be reached" not in lines[line - 1]
    ]
    assert not found, "\n".join(found)
