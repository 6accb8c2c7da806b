"""`pic query`: answers, explanations, bulks, and what a wrong command line gets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from commands.run import Outcome, pic, write
from pictool.commands import query as query_command
from pictool.errors import InputError
from pictool.linker.prefixes import BLOCK

CALL = {"model": "default", "max_tokens": 4, "temperature": 0}


def g(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"g": {**CALL, **more, "input": list(items)}}


def user(text: str) -> dict[str, Any]:
    return {"user": text}


JUDGE = g({"plus": [{"file": "a.txt"}, {"plus": [g(user("two")), g(user("one"))]}]}, user("Who knows?"))


@pytest.fixture
def query(model: Path, texts: tuple[Path, Path]) -> Any:
    """Runs `pic query` on a query, given as data, beside two documents."""

    def run(data: Any, *options: object, name: str = "q.json") -> Outcome:
        write(name, data if isinstance(data, str) else json.dumps(data))
        return pic("query", name, "-m", model, *options)

    return run


def test_a_query_over_files_answers_as_a_link_of_them(query: Any, model: Path, texts: tuple[Path, Path]) -> None:
    linked = pic("link", *texts, "-q", "Who knows?", "-m", model, "--max-new-tokens", 4, "--json").json
    report = query(g({"plus": [{"file": "a.txt"}, {"file": "b.txt"}]}, user("Who knows?")), "--json").json
    (call,) = report["calls"]
    assert {key: call[key] for key in ("answer", "algo", "params", "tokens")} == {
        key: linked[key] for key in ("answer", "algo", "params", "tokens")
    }
    assert report["answer"] == linked["answer"] and call["path"] == "the query"
    assert [start for start, _ in call["spans"]][1:] == [end for _, end in call["spans"]][:-1]


def test_the_answer_goes_to_stdout_and_a_line_for_every_call_to_stderr(query: Any) -> None:
    outcome = query(JUDGE, "--algo", "full")
    report = query(JUDGE, "--algo", "full", "--json").json
    assert outcome.out == report["answer"] + "\n"
    paths = [line.split(": ")[1] for line in outcome.err.splitlines() if "context rows recomputed" in line]
    assert paths == [call["path"] for call in report["calls"]] and paths[-1] == "the query"
    assert [step["rule"] for step in report["steps"]] == ["flatten +"]
    assert query({"seq": [user("a"), {"print": "shown"}, user("b")]}).out == "a\nb\n"


def test_every_call_says_whether_its_reuse_was_exact(query: Any) -> None:
    def exact(*options: object) -> list[bool]:
        return [call["exact"] for call in query(JUDGE, "--json", *options).json["calls"]]

    assert exact("--algo", "full") == [True] * 3
    assert exact("--algo", "naive") == [True, True, False]  # those of no documents reuse nothing


def test_the_order_of_a_plus_is_as_written_unless_it_is_asked_for(query: Any) -> None:
    def rules(*options: object) -> list[str]:
        report = query(JUDGE, "--explain", "--json", *options).json
        return [step["rule"] for step in report["steps"]]

    for algo in ("full", "prefix", "naive"):
        assert rules("--algo", algo) == ["flatten +"]
        assert rules("--algo", algo, "--sort-plus") == ["flatten +", "order +"]
    assert rules("--no-optimise") == []
    assert query(JUDGE, "--no-optimise", "--algo", "full").out == query(JUDGE, "--algo", "full").out


def test_explain_prints_the_trees_and_runs_nothing(query: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.spans.execute.Executor.run_all", None)
    calls = {"repeat": {"n": 2, **g(user("three"), temperature=1.0)}}
    judge = g({"plus": [*JUDGE["g"]["input"][0]["plus"], calls]}, user("Who knows?"))
    outcome = query(judge, "--explain", "--tree", 2)
    assert "(the model reads another prompt)" in outcome.out and "calls        7\ntext tokens  " in outcome.out
    assert outcome.code == 0 and "reduce by tree at the query" in outcome.out
    plain = query(user("a"), "--explain")
    assert plain.out.startswith('no rule applies\nU "a"\ncalls        0\ntext tokens') and "before" not in plain.out
    missing = query(g({"plus": [{"file": "no.txt"}]}), "--explain")
    assert missing.code == 1 and "error: g.input[0].plus[0]: no.txt: " in missing.err
    report = query(JUDGE, "--explain", "--json").json
    assert report["query"]["g"]["input"]["cross"][1] == user("Who knows?")
    assert [step["path"] for step in report["steps"]] == ["g.input.cross[0]"]


def test_yaml_stdin_and_files_beside_the_query(query: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"seq": [{"file": "c.txt"}, user("")]}
    write("below/c.txt", "found\n")
    assert query(data, name="below/q.json").out.strip() == "found"
    assert query("seq:\n- file: c.txt\n", name="below/q.yaml").out.strip() == "found"
    assert query(data).err == "pic: error: seq[0]: c.txt: cannot be read (No such file or directory)\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"user": "a"}')))
    assert query_command.read_input("-") == ('{"user": "a"}', "stdin", Path())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(InputError, match=r"^stdin: "):
        query_command.read_input("-")


def test_traces_of_every_call(query: Any) -> None:
    assert query(JUDGE, "--trace", "traces").code == 0
    files = sorted(Path("traces").iterdir())
    assert [file.name for file in files] == ["0001.trace", "0002.trace", "0003.trace", "run.json"]
    assert pic("inspect", files[2]).code == 0
    assert query(JUDGE, "--trace", "traces").err.startswith("pic: error: --trace traces: must be an empty")


def test_a_run_is_inspected(query: Any) -> None:
    report = query(JUDGE, "--trace", "traces", "--algo", "legolink-16", "--json").json
    shown = pic("inspect", "traces")
    assert shown.code == 0
    table = shown.out[shown.out.index("node ") :].splitlines()[1:]
    assert [line.split()[-1] for line in table if " 000" in line] == ["0003", "0001", "0002"]  # the judge is the root
    for call, number in zip(report["calls"], ("0001", "0002", "0003"), strict=True):
        (line,) = [line for line in table if line.endswith(number)]
        assert f" {call['tokens']['context']} " in line and f" {call['tokens']['recomputed']:.1f} " in line
    assert "exact        2 of 3 calls" in shown.out, "the judge links what the others generated"
    data = pic("inspect", "traces/run.json", "--json").json
    assert data["answer"] == report["answer"] and data["optimised"] == report["optimised"]
    assert pic("inspect", "traces", "--text").err.startswith("pic: error: traces: is a query run")
    assert pic("inspect", "traces", "traces").code == 2
    failing = g({"plus": [g(user("a")), {"file": "no.txt"}]}, user("b"))
    assert query(failing, "--trace", "failed").code == 1
    assert "none: g.input[0].plus[1]: no.txt: cannot be read" in pic("inspect", "failed").out


def test_outputs_are_linked_as_generated_or_compiled(query: Any) -> None:
    for name, is_kept in (("generated", True), ("compiled", False)):
        calls = query(JUDGE, "--outputs", name, "--json").json["calls"]
        assert [call["object"] is not None for call in calls] == [is_kept, is_kept, False]


def test_sampling_and_budgets(query: Any) -> None:
    drawn = g({"plus": [{"repeat": {"n": 2, "g": {**CALL, "temperature": 2.0, "input": user("x")}}}]}, temperature=2.0)
    one, same, other = (query(drawn, "--seed", seed, "--json").json["answer"] for seed in (1, 1, 2))
    assert one == same != other
    outcome = query(drawn, "--budget-tokens", 5)
    assert outcome.code == 1 and outcome.err.endswith("the budget of 5 tokens is used up; allow more\n")
    failed = query(drawn, "--budget-tokens", 5, "--json")
    report = json.loads(failed.out)
    assert failed.code == 1 and report["answer"] is None and report["error"] in failed.err
    assert [call["path"] for call in report["calls"]] == ["g.input.plus[0].repeat[0]", "g.input.plus[0].repeat[1]"]


def test_a_bulk_goes_on_where_it_stopped_and_says_what_failed(query: Any) -> None:
    lines = [g({"plus": [{"file": name}]}, user("Who?")) for name in ("a.txt", "b.txt", "a.txt", "no.txt")]
    good = "\n".join(map(json.dumps, lines[:3]))
    plan = query(good, "--explain", name="q.jsonl")
    assert plan.out.splitlines()[0] == "order        1 3 2" and "planned" in plan.out
    shares = query(good, "--explain", "--json", name="q.jsonl").json["hits"]
    assert shares["as_given"] < shares["planned"]
    assert query(good, "-o", "out.jsonl", name="q.jsonl").code == 0
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 3, 2]
    assert records[0]["answer"] == records[1]["answer"]
    Path("out.jsonl").write_text(json.dumps(records[0]) + "\n")
    assert query(good, "-o", "out.jsonl", name="q.jsonl").code == 0
    again = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [record["answer"] for record in again] == [record["answer"] for record in records]
    bad = query("\n".join([good, '{"g": 1}']), name="bad.jsonl")
    assert bad.err == "pic: error: bad.jsonl:4: g: must be a mapping with model, input, not 1\n" and bad.code == 1


def test_answers_of_a_bulk_hold_for_the_files_and_options_that_they_follow_from(query: Any) -> None:
    """A file and a folder that queries read, policy and seed."""
    write("docs/one.txt", "Nukstead lies by the river.")
    lines = [
        g({"file": "a.txt"}, user("Who?")),
        g({"retrieve": {"from": "docs", "query": user("Who?")}}, user("Who?")),
        g(user("Who?")),
    ]

    def num_stale(*options: object) -> int:
        outcome = query("\n".join(map(json.dumps, lines)), "-o", "out.jsonl", *options, name="q.jsonl")
        assert outcome.code == 0
        records = map(json.loads, Path("out.jsonl").read_text().splitlines())
        assert sorted(record["line"] for record in records) == [1, 2, 3]
        notes = [line for line in outcome.err.splitlines() if "of its answers" in line]
        assert len(notes) < 2
        return int(notes[0].split()[2]) if notes else 0

    assert num_stale() == num_stale() == 0
    Path("a.txt").write_text("It was somebody else.")
    assert num_stale() == 1
    write("docs/two.txt", "Rulholm lies by the sea.")
    assert num_stale() == 1
    assert num_stale("--algo", "naive") == num_stale("--algo", "naive", "--seed", 1) == 3


def test_equal_lines_of_a_bulk_draw_on_their_own(query: Any) -> None:
    line = json.dumps(g(user("a"), temperature=5.0, max_tokens=8))
    answers = [each["answer"] for each in query("\n".join([line] * 3), "--json", name="q.jsonl").json]
    assert len(set(answers)) == 3
    again = query("\n".join([line] * 3), "--json", name="q.jsonl").json
    assert [each["answer"] for each in again] == answers


def test_a_missing_file_is_the_error_of_its_line(query: Any) -> None:
    lines = [g({"plus": [{"file": name}]}, user("Who?")) for name in ("no.txt", "a.txt")]
    lines.append(g({"retrieve": {"from": "none", "query": user("x")}}, user("Who?")))
    outcome = query("\n".join(map(json.dumps, lines)), "--json", name="q.jsonl")
    assert outcome.code == 1 and "q.jsonl: 2 of 3 queries failed; line 1: g.input[0].plus[0]: no.txt" in outcome.err
    assert ["error" in record for record in json.loads(outcome.out)] == [True, False, True]


def test_a_query_of_a_bulk_that_fails_stops_no_other(query: Any) -> None:
    text = "\n".join(json.dumps(one) for one in (g(user("word " * 999)), g(user("fine"))))
    outcome = query(text, "-o", "out.jsonl", name="q.jsonl")
    assert outcome.code == 1
    assert "q.jsonl: 1 of 2 queries failed; line 1: " in outcome.err
    assert {record["line"]: "answer" in record for record in map(json.loads, Path("out.jsonl").read_text().splitlines())
            } == {1: False, 2: True}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-o", "a.jsonl"], 2, "-o: needs queries in a .jsonl file"),
        (["--explain", "--trace", "t"], 2, "--trace: "),
        (["--no-optimise", "--tree", "2"], 2, "--tree: "),
        (["--outputs", "x"], 2, "--outputs x: must be generated or compiled"),
        (["--algo", "nope"], 2, "algorithm 'nope': must be one of"),
    ],
)
def test_wrong_options(query: Any, options: list[str], code: int, message: str) -> None:
    outcome = query(JUDGE, *options)
    assert outcome.code == code and outcome.err.startswith(f"pic: error: {message}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"plus": [{"x": 1}]}, "q.json: plus[0]: unknown operator 'x'"),
        ("{", "q.json: is not JSON (line 1, column 2"),
        (g({"plus": []}), "the query: the input is empty"),
        (
            g({"plus": [g({"cross": []}), user("b")]}),
            "g.input[0].plus[0]: the input is empty",
        ),
        (g({"ask": "Who?"}), "g.input[0]: asks 'Who?'"),
        ('{"seq":[' * 10_000 + "]}" * 10_000, "q.json: seq[0].seq[0].seq[0].seq[0] … "),
    ],
)
def test_wrong_queries_get_one_line(query: Any, data: Any, message: str) -> None:
    outcome = query(data)
    assert outcome.code == 1 and outcome.err.startswith(f"pic: error: {message}") and outcome.err.count("\n") == 1


def test_errors_name_the_path_in_the_file(query: Any) -> None:
    """The optimizer moves nodes; the user's file stays as it is."""
    call = {
        "chat": {**CALL, "input": [{"plus": [{"plus": [{"plus": [g(user("a"), {"file": "no.txt"})]}]}]}, user("b")]}
    }
    for algo in ("full", "naive"):
        error = query({"seq": [user(""), call]}, "--algo", algo).err
        assert "error: seq[1].chat.input[0].plus[0].plus[0].plus[0].g.input[1]: no.txt: cannot be read" in error
    missing = {"seq": [user(""), {"retrieve": {"from": "none", "query": user("x")}}]}
    assert "error: seq[1]: none: cannot be read" in query(missing).err


def test_models_of_other_providers_do_not_run_here(model: Path, texts: tuple[Path, Path]) -> None:
    write("q.json", json.dumps(g(user("a"), model="ollama/granite3.3:2b")))
    assert pic("query", "q.json").err.startswith("pic: error: the query: model 'ollama/granite3.3:2b' is ollama's")
    write("q.json", json.dumps(g(user("a"), model=f"spnl/{model}")))
    assert pic("query", "q.json", "--json").json["calls"][0]["model"] == str(model)


def test_what_the_user_types_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return "me\n"

    monkeypatch.setattr("sys.stdin", Terminal())
    assert query_command.ask("Who?") == "me"
    assert capsys.readouterr().err == "Who? "


def test_a_pool_on_the_device_changes_no_answer(query: Any) -> None:
    """Every call links from what the one before left there."""
    pages = {"plus": [{"file": "a.txt"}, {"file": "b.txt"}]}
    rounds = {"seq": [g(pages, user("one?")), g({"plus": pages["plus"][::-1]}, user("two?")), g(pages, user("three?"))]}
    plain = query(rounds, "--json").json
    report = query(rounds, "--json", "--pool", "1M").json
    assert [call["answer"] for call in report["calls"]] == [call["answer"] for call in plain["calls"]]
    assert all(call["pool"]["prefix"] % BLOCK == 0 for call in plain["calls"])
    pools = [call["pool"] for call in report["calls"]]
    context = [call["tokens"]["context"] for call in report["calls"]]
    kept = [tokens - 1 for tokens in context[1:]]  # not what is between
    assert [pool["resident"] for pool in pools] == [0, *kept] and [pool["moves"] for pool in pools] == [0, 2, 2]
    assert "context rows recomputed, 0 were on the device, TTFT" in query(rounds, "--pool", "1M").err


def test_a_pool_that_cannot_be(query: Any) -> None:
    for size, code, problem in (
        ("1", 2, "--pool '1': "),
        ("1K", 1, " 1000 bytes"),
    ):
        outcome = query(g(user("x")), "--pool", size)
        assert outcome.code == code and problem in outcome.err and outcome.err.count("\n") == 1
