"""The benchmark of real models on a random one: a run that is continued, its tables, and the noise of rounding."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import __main__ as real
from benchmarks.real import rows
from benchmarks.real.prompts import CHOICE_SEED, Question, Texts, code, half, records, tasks
from benchmarks.real.report import markdown_lines, summary, text_lines, worst_lines
from pictool.runtime.model import Model

LABELS = "naive@none,naive@text,naive@none+float8_e4m3_head,full,again"


@pytest.fixture
def arguments(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(real, "load_model", lambda *_: model)
    out = str(tmp_path / "real.json")
    return ["any", "--policies", LABELS, "--kinds", "code,tasks", "--prompts", "1", "--tokens", "2", "--out", out]


def run(arguments: list[str]) -> dict[str, Any]:
    return real.measure_all(real.parse(arguments))


def test_a_run_measures_what_its_file_lacks(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = run([*arguments, "--kinds", "code"])
    assert [each["kind"] for each in first["answers"]] == ["code"]
    both = run(arguments)
    assert [each["kind"] for each in both["answers"]] == ["code", "tasks"] and both["answers"][0] == first["answers"][0]
    assert json.loads(Path(arguments[-1]).read_text())["summary"].keys() == {"code", "tasks", "all"}
    with pytest.raises(SystemExit):
        run([*arguments, "--tokens", "3"])


def test_a_run_leaves_a_row_and_adding_it_writes_the_page(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = ["--policies", "naive@none,auto,again", "--kinds", "code"]
    results = run([*arguments, *policies])
    handed_in = tmp_path / "real.row.json"
    row = json.loads(handed_in.read_text())
    assert [line["policy"] for line in row["lines"]] == ["naive@none", "auto"]  # "again" has no TTFT
    assert row["model"]["fingerprint"] and row["machine"]["torch"] and row["settings"]["seed"] == 8 and row["date"]
    assert not any(each["query"] in handed_in.read_text() for each in results["answers"])
    page = tmp_path / "results.md"
    page.write_text(f"Before\n{rows.START}\nold\n{rows.END}\nAfter\n")
    for name, value in {"ROOT": tmp_path, "ROWS": tmp_path / "rows", "PAGE": page, "EARLIER": {}}.items():
        monkeypatch.setattr(rows, name, value)
    for _ in range(2):  # a row that is added again takes the place of the first
        rows.add(handed_in, "busy")
        rows.write_page()
    written = page.read_text().splitlines()
    assert written[0] == "Before" and written[-1] == "After" and "old" not in written
    line = next(line for line in written if " auto |" in line)
    found = results["summary"]["all"]["policies"]["auto"]
    assert (
        ", busy |" in "".join(written)
        and f"{found['left']:.2f} |" in line
        and f"{found['worst_nats']:.1f} nats" in line
        and "[`" in line
    )
    assert sum(" auto |" in line for line in written) == 1 and not any("naive" in line for line in written[1:])
    handed_in.write_text("{}")
    with pytest.raises(SystemExit, match=r"real\.row\.json"):
        rows.add(handed_in)


def test_the_clock_and_lengths_alone_leave_prompts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    questions = [Question("code", ("x" * length,), "?") for length in (100, 400, 100, 100)]
    ran = []
    for question in real.in_time(questions, ends=45.0):
        ran.append(questions.index(question))
        now += 0.15 * len(question.documents[0])
    assert [len(questions[at].documents[0]) for at in ran] == [100, 100] and now == 30.0
    assert not list(real.in_time(questions, ends=now))


def test_lines_are_of_prompts_of_a_length_and_tasks_apart() -> None:
    def prompt(kind: str, tokens: int, kl: float, seconds: float) -> dict[str, Any]:
        found = {
            "naive@none": {"kl": [2.0], "same": False, "right": False, "rows": 0.0, "ttft_s": seconds / 4},
            "auto": {"kl": [kl], "same": kl == 0, "right": kl == 0, "rows": 0.1, "ttft_s": seconds / 2},
        }
        return {"kind": kind, "tokens": tokens, "gold": "x", "right": True, "full_ttft_s": seconds, "policies": found}

    prompts = [prompt("code", 1100 + at, at % 2, 4.0 + at) for at in range(5)]
    lines = list(rows.lines_of([*prompts, prompt("records", 900, 1.0, 2.0), prompt("tasks", 1000, 0.0, 2.0)]))
    auto = {line.prompts: line for line in lines if line.policy == "auto"}
    assert list(auto) == ["1 records", "5 code", "1 tasks"]
    code_line = auto["5 code"]
    assert (code_line.tokens, code_line.full_s, code_line.linked_s) == (1102, 6.0, 3.0)
    assert code_line.left == pytest.approx(0.2) and code_line.low is not None and code_line.worst_nats == 1
    assert (code_line.same, code_line.right) == ((3, 5), [3, 5])
    assert auto["1 records"].low is None and auto["1 tasks"].same == (1, 1)


def test_full_recompute_leaves_nothing_and_another_computation_its_rounding(arguments: list[str]) -> None:
    results = run(arguments)
    for each in results["answers"]:
        kl = {label: sum(found["kl"]) for label, found in each["policies"].items()}
        assert kl["full"] == 0 and kl["again"] < 1e-6 < kl["naive@none"]
        assert 0 < abs(kl["naive@none+float8_e4m3_head"] / kl["naive@none"] - 1) < 0.5
        assert each["policies"]["full"]["same"] and each["policies"]["naive@none"]["rows"] < 0.1
    table = summary(results["answers"])
    assert table["all"]["policies"]["naive@none"]["left"] == 1
    assert any("naive@text" in line for line in text_lines(table))
    rows = [line.count("|") for line in markdown_lines(table)]
    assert len(set(rows)) == 1 and len(rows) == 3 + len(LABELS.split(","))
    assert sum("query:" in line for line in worst_lines(results["answers"], "naive@none")) == 2


def test_other_seeds_ask_about_other_documents(model: Model) -> None:
    texts = Texts(model)
    for kind in (code, records, tasks):
        chosen, held_out = ({text for each in kind(texts, 4, seed) for text in each.documents} for seed in (7, 8))
        assert chosen and held_out and not chosen & held_out
    assert [*half(range(9), CHOICE_SEED), *half(range(9), 8)] == list(range(9))
