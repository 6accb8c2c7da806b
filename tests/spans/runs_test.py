"""The file of a query's run: it comes back as it was written, and what others wrote is not believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pictool.errors import InputError
from pictool.spans.dsl import g, par, plus, repeat
from pictool.spans.operators.calls import Call, Map
from pictool.spans.running import CallRecord
from pictool.spans.runs import FILE, read_run, write_run

OWN = {
    "answer": "yes", "algo": "naive", "tokens": {"context": 8, "recomputed": 2.0, "prompt": 11, "generated": 1},
    "timing": {"ttft_s": 0.5},
}  # fmt: skip
QUERY = g(plus(repeat(2, g("x", temperature=0)), Map(Call("m"), ("a",))), "Which?")
INNER = ("g", "input", "cross", 0, "plus", 0, "repeat")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    first = CallRecord((*INNER, 0), "yes", (4,), dict(OWN), ((0, 1),))
    done = [
        first,
        CallRecord((*INNER, 1), "yes", (4,), first.own, ((0, 1),), is_shared=True),
        CallRecord((), "yes", (4,), dict(OWN), (), is_exact=False),
    ]
    traces = {done[0].path: "0001.trace", (): "0002.trace"}
    return write_run(tmp_path / "run", QUERY, done, traces, {"answer": "yes", "error": None})


def test_a_run_is_read_as_it_was_written(run: Path) -> None:
    for path in (run, run.parent):
        read = read_run(path)
        assert (read.answer, read.error, read.num_run) == ("yes", None, 2)
        first, shared, last = read.calls.values()
        assert (first.path, first.context, first.reused, first.share) == ((*INNER, 0), 8, 6.0, 0.75)
        assert first.trace == shared.trace == run.parent / "0001.trace" and shared.is_shared
        assert (first.is_exact, shared.is_exact, last.is_exact) == (True, True, False)
        assert last.path == () and last.trace == run.parent / "0002.trace"


def test_a_run_of_an_earlier_release_says_of_no_call_that_it_is_exact(run: Path) -> None:
    data = json.loads(run.read_text())
    for call in data["calls"]:
        del call["exact"]
    run.write_text(json.dumps(data))
    assert {call.is_exact for call in read_run(run).calls.values()} == {None}


def test_every_call_has_a_line_of_the_tree(run: Path) -> None:
    read = read_run(run)
    lines = [node.lead + node.label.split()[0] for node in read.nodes]
    assert lines == [
        "G", "└─ ⋈", "   ├─ +", "   │  ├─ repeat", "   │  │  ├─ output", "   │  │  ├─ output", "   │  │  └─ G",
        "   │  │     └─ U", "   │  └─ map", "   │     └─ output", "   └─ U",
    ]  # fmt: skip
    assert set(read.calls) <= {node.path for node in read.nodes}
    assert read.nodes[-2].path == ("g", "input", "cross", 0, "plus", 1, "map", 0)


def change(key: str, value: Any) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        data[key] = value

    return apply


def change_call(key: str, value: Any) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        data["calls"][0][key] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "problem"),
    [
        (change("format", "else"), "format 'else' of version 1"),
        (change("version", 2), "of version 2"),
        (change("answer", 3), "answer and error must be"),
        (change("nodes", {}), "{} is not a list"),
        (change("calls", [3]), "is not a query run"),
        (change_call("trace", "../../etc/passwd"), "is not the name of a file"),
        (change_call("trace", 3), "3 is not a string"),
        (change_call("tokens", {"context": True}), "True is not a number"),
        (change_call("tokens", {}), "it has no 'context'"),
        (change_call("node", [1.5]), "[1.5] is not a path"),
        (change_call("answer", None), "None is not a string"),
        (lambda data: data.pop("nodes"), "it has no 'nodes'"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(run: Path, apply: Callable[[Any], None], problem: str) -> None:
    data = json.loads(run.read_text())
    apply(data)
    run.write_text(json.dumps(data))
    with pytest.raises(InputError) as error:
        read_run(run)
    assert str(error.value).startswith(f"{run}: is not a query run (") and problem in str(error.value)
    assert "\n" not in str(error.value) and "run pic query --trace again" in str(error.value)


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"\xff", b'{"format": NaN}', b"[1, 2]"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(InputError, match=str(tmp_path)):
        read_run(tmp_path)


def test_a_run_without_calls_is_one(tmp_path: Path) -> None:
    write_run(tmp_path, par("a"), [], {}, {"answer": None, "error": "par[0]: failed"})
    read = read_run(tmp_path)
    assert read.error == "par[0]: failed" and len(read.nodes) == 2 and not read.calls
