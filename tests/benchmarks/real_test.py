"""The benchmark of real models on a random one: a run that is continued, its tables, and the noise of rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import __main__ as real
from benchmarks.real.prompts import CHOICE_SEED, Texts, code, half, records, tasks
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
