"""`pic eval`: what it prints, where its results are, and what it refuses before anything runs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands.run import Outcome, pic, write
from pictool.commands.console.progress import answers_bar
from pictool.commands.console.terminal import Screen
from pictool.commands.eval import ms, number, parts_table, percent, size
from pictool.eval import summary as summaries

DEFAULTS: dict[str, Any] = {"algo": ["naive", "legolink-2"], "max_new_tokens": 4, "store": "st"}
RECORDS: list[dict[str, Any]] = [
    {"documents": ["a.txt", "b.txt"], "query": "Who knows why?", "answers": ["nobody"], "kind": "x", "id": "one"},
    {"documents": ["a.txt", "b.txt"], "query": "Who asked?", "answers": ["she"], "kind": "y", "id": "two"},
    {"documents": [{"text": "Nobody knows the harbour."}], "query": "Who?", "answers": ["she"], "kind": "y", "id": "3"},
]  # fmt: skip
Run = Callable[..., Outcome]


@pytest.fixture
def run(model: Path, texts: tuple[Path, Path]) -> Run:
    """Runs `pic eval` on three questions over a.txt, b.txt and a text, with the tiny model."""
    write("q.jsonl", "\n".join(map(json.dumps, RECORDS)))
    return lambda dataset="q.jsonl", **options: pic("eval", dataset, "-m", model, *arguments(**DEFAULTS | options))


def arguments(**options: Any) -> Iterator[object]:
    """json=True, limit=3, algo=["full"] → --json --limit 3 --algo full."""
    for name, value in options.items():
        option = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            yield from [option] if one is True else [option, one]


def steady(report: dict[str, Any]) -> list[Any]:
    return [{name: value for name, value in line.items() if name not in summaries.MEASURED} for line in report["lines"]]


def test_the_tables_have_a_line_for_every_policy_in_80_columns(run: Run) -> None:
    outcome = run()
    assert outcome.code == 0, outcome.err
    first, *lines = outcome.out.splitlines()
    assert first.startswith("q.jsonl: 3 questions over 2 sets of documents, ") and "float32 on cpu, 1 thread" in first
    assert [line.split()[0] for line in lines if line.startswith(("full", "naive", "lego"))] == [
        *["full", "naive", "legolink-2"] * 3, "naive", "legolink-2",
    ]  # fmt: skip
    heads = [line.split() for line in lines if line.startswith("policy")]
    assert heads[0] == ["policy", "f1", "95", "%", "diff", "95", "%", "lost", "won", "KL", "all", "same"]
    assert heads[1][1:] == ["rows", "TTFT", "speedup", "load", "select", "compute", "tok/s", "peak", "read"]
    kinds = [line.split() for line in lines if line.endswith("y (2)")]
    assert kinds == [["f1", "x", "(1)", "y", "(2)"], ["same", "x", "(1)", "y", "(2)"]]
    assert max(map(len, lines)) <= 80


def test_notes_and_progress_are_not_on_stdout(run: Run) -> None:
    outcome = run()
    begun, written = outcome.err.splitlines()
    assert begun.startswith("pic: q.jsonl, ") and begun.endswith(": 9 answers")
    assert written.startswith("pic: results are in st/eval/results/") and Path(written.split()[-1]).is_file()
    (again,) = run().err.splitlines()
    assert again == written
    more = run(algo=["full", "cacheblend-15"]).err.splitlines()
    assert more[0].endswith(": 3 answers to go, 3 are done already")


def test_json_is_the_summary_and_the_same_in_every_run(run: Run) -> None:
    first = run(json=True).json
    assert [line["label"] for line in first["lines"]] == ["full", "naive", "legolink-2"]
    assert (first["questions"], first["units"], first["kinds"]) == (3, 2, {"x": 1, "y": 2})
    assert first["lines"][0]["kl"] == {"mean": 0.0, "low": None, "high": None} and first["lines"][1]["kl"]["mean"] > 0
    assert run(json=True).json == first
    other = run(json=True, store="other", algo=["legolink-2", "naive"]).json
    assert steady(other) == steady(first)


def test_many_kinds_are_rows() -> None:
    counts = {f"kind-{i}": i for i in range(5)}
    table = parts_table("em", counts, {"full": dict.fromkeys(counts, "1.0"), "naive": {"kind-2": "0.5"}})
    screen = Screen(file=io.StringIO(), width=80)
    screen.print(table)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].split() == ["em", "full", "naive"] and lines[4].split() == ["kind-2", "(2)", "1.0", "0.5"]
    assert lines[2].split() == ["kind-0", "(0)", "1.0", "-"]


def test_results_can_be_put_anywhere_but_over_an_input(run: Run) -> None:
    assert run(output="out/r.jsonl").code == 0
    assert len(Path("out/r.jsonl").read_text().splitlines()) == 1 + 9
    assert "q.jsonl: is also an input" in run(output="q.jsonl").err
    assert "st: is a directory" in run(output="st").err
    assert Path("q.jsonl").read_text().startswith('{"documents"')


def test_another_experiment_in_the_file_is_refused(run: Run) -> None:
    assert run(output="r.jsonl").code == 0
    refused = run(output="r.jsonl", head="You are.")
    assert refused.code == 1 and "r.jsonl" in refused.err and "head" in refused.err
    assert len(refused.err.splitlines()) == 1


def test_a_metric_needs_no_new_run(run: Run) -> None:
    run()
    outcome = run(metric="contains")
    assert "answers" not in outcome.err and outcome.out.splitlines()[2].split()[1] == "contains"
    names = "f1, em, rouge_l, contains, json"
    assert run(metric="bleu").err == f"pic: error: metric 'bleu': must be one of {names}\n"


def test_options_reach_the_run(run: Run) -> None:
    report = run(
        json=True, limit=1, chunk_tokens=7, head="You are.", query_template="{query}!", max_new_tokens=2, algo=[],
        p="metric=em",
    ).json  # fmt: skip
    assert report["header"]["settings"] == {
        "chunk_tokens": 7, "head": "You are.", "query_template": "{query}!", "max_new_tokens": 2,
            "codec": "none",
    }  # fmt: skip
    assert [line["label"] for line in report["lines"]] == ["full", "naive", "auto", "cacheblend-15", "legolink-16"]
    assert report["questions"] == 1 and report["metric"] == "em"


def test_cases_that_are_left_out_are_told(run: Run) -> None:
    write("long.jsonl", "\n".join(map(json.dumps, [RECORDS[0], {**RECORDS[2], "documents": [{"text": "no " * 600}]}])))
    outcome = run(dataset="long.jsonl")
    assert "pic: 1 case skipped" in outcome.err and "long.jsonl: 1 question over 1 set" in outcome.out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"dataset": "nowhere"}, 1, "dataset 'nowhere': "),
        ({"p": "metric"}, 2, "-p metric: "),
        ({"p": "prompts=3"}, 1, "'prompts'"),
        ({"algo": "lego"}, 2, "algorithm 'lego': "),
        ({"query_template": "?"}, 1, "query template '?': "),
    ],
)
def test_what_is_refused(run: Run, options: dict[str, Any], code: int, message: str) -> None:
    write("q.svg", "")
    outcome = run(**options)
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.err and len(outcome.err.splitlines()) == 1
    assert not Path("st").exists()


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with answers_bar("world, tiny") as bar:
        for done in (3, 6, 12):
            bar(done, 12)
    shown = capsys.readouterr()
    assert shown.out == "" and "world, tiny" in shown.err and "12/12" in shown.err


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(0), "0"),
        (number(0.1234), "0.123"),
        (number(0.00042), "4e-04"),
        (number(12.3456), "12.346"),
        (percent(0), "0%"),
        (percent(0.0345), "3.5%"),
        (percent(0.355), "36%"),
        (percent(1.63), "163%"),
        (ms(0.0123), "12.3"),
        (ms(1.2345), "1,234"),
        (size(None), "-"),
        (size(1_234_000), "1.2"),
        (size(2.5e9), "2,500"),
    ],
)
def test_numbers_as_they_are_shown(shown: str, expected: str) -> None:
    assert shown == expected


def test_an_answer_ends_where_it_is_told_to(run: Run) -> None:
    """And the two experiments have different results files, so that neither is taken for the other."""
    whole, ended = (Path(name) for name in ("whole.jsonl", "ended.jsonl"))
    assert run(o=str(whole), max_new_tokens=8).code == 0
    (_, first, *_) = map(json.loads, whole.read_text().splitlines())
    letter = first["answer"][3]
    outcome = run(o=str(ended), max_new_tokens=8, stop=[letter])
    assert outcome.code == 0, outcome.err
    header, *results = map(json.loads, ended.read_text().splitlines())
    assert header["settings"]["stop"] == [letter]
    assert all(letter not in result["answer"] for result in results)
    assert first["answer"].startswith(next(result["answer"] for result in results if result["id"] == first["id"]))
    refused = run(o=str(ended), max_new_tokens=8)
    assert refused.code == 1 and "stop" in refused.err
