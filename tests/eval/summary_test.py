"""The table: every number worked out by hand on five rows of two algorithms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pictool.errors import InputError
from pictool.eval.evaluate import Evaluation
from pictool.eval.policies import parse_policies
from pictool.eval.results import CaseResult, ResultsHeader, Times
from pictool.eval.statistics import clustered_mean
from pictool.eval.summary import Summary, summarise

HEADER = ResultsHeader("pictool-eval", 1, "0", "0", {"name": "given", "params": {}}, {"name": "tiny"}, {}, 1, {})
ALGORITHMS = tuple(parse_policies(["naive", "legolink-2"]))
GROUPS = (("a", "b"), ("c",))


def row(name: str, label: str, f1: float, **more: Any) -> CaseResult:
    kind = {"a": "x", "b": "y", "c": "x"}[name]
    given = CaseResult(
        name, label, kind, label, {}, None, "f1", {"f1": f1, "em": 0.0}, "", 0.0, 0.0, 1.0, 4, 4, 20, 16, 16.0, 0,
        Times(0.4, 0.1, 0.1, 0.2, 0.5), 100,
    )  # fmt: skip
    return replace(given, **more)


def times(ttft_s: float, decode_s: float = 1.0) -> Times:
    return Times(ttft_s, ttft_s / 4, ttft_s / 4, ttft_s / 2, decode_s)


ROWS = [
    [row("a", "full", 1.0), row("b", "full", 0.5), row("c", "full", 0.0, timing=times(1.0))],
    [
        row("a", "naive", 0.5, kl=0.3, answer_kl=0.9, answer="x", agreement=0.5, common_prefix=1, rows=0.0,
            bytes_read=10, timing=times(0.1)),
        row("b", "naive", 0.5, kl=0.6, agreement=1.0, common_prefix=4, rows=0.0, bytes_read=20, timing=times(0.2)),
        row("c", "naive", 1.0, kl=0.0, agreement=0.0, common_prefix=0, rows=8.0, bytes_read=60, peak_bytes=None,
            timing=times(0.8)),
    ],
    [row(name, "legolink-2", 0.0, kl=None, answer_kl=None, timing=Times(2.0, 0, 0, 1, 0.0)) for name in "abc"],
]  # fmt: skip


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(made())


def made(rows: list[list[CaseResult]] = ROWS) -> Evaluation:
    flat = tuple(rows[i][j] for j in range(3) for i in range(3))
    return Evaluation(Path("r.jsonl"), HEADER, ALGORITHMS, GROUPS, flat, ())


def test_what_it_is_about(summary: Summary) -> None:
    assert (summary.title, summary.results) == ("given", "r.jsonl")
    assert (summary.metric, summary.questions, summary.units, summary.tokens) == ("f1", 3, 2, 20)
    assert summary.kinds == {"x": 2, "y": 1} and [line.label for line in summary.lines] == [
        "full",
        "naive",
        "legolink-2",
    ]
    assert json.loads(json.dumps(summary.report()))["lines"][1]["score"]["mean"] == pytest.approx(2 / 3)


def test_quality(summary: Summary) -> None:
    full, naive, rerank = summary.lines
    assert [line.score.mean for line in summary.lines] == pytest.approx([0.5, 2 / 3, 0.0])
    assert naive.score == clustered_mean([0.5, 0.5, 1.0], [0, 0, 1])
    assert (naive.score.low, naive.score.high) == (0.5, 1.0)  # two sets of documents: 0.5 and 1
    assert naive.difference == clustered_mean([-0.5, 0.0, 1.0], [0, 0, 1])
    assert (naive.lost, naive.won) == pytest.approx((1 / 3, 1 / 3))
    assert (full.difference.mean, full.lost, full.won) == (0, 0, 0)
    assert (rerank.lost, rerank.won) == pytest.approx((2 / 3, 0))


def test_fidelity(summary: Summary) -> None:
    full, naive, rerank = summary.lines
    assert full.kl is not None and full.kl.mean == 0 and rerank.kl is None
    assert naive.kl == clustered_mean([0.3, 0.6, 0.0], [0, 0, 1])
    assert naive.answer_kl == clustered_mean([0.9, 0.0, 0.0], [0, 0, 1]) and rerank.answer_kl is None
    assert naive.same_answer == pytest.approx(2 / 3) and full.same_answer == 1
    assert (naive.agreement, naive.common_prefix) == pytest.approx((0.5, 5 / 3))


def test_cost(summary: Summary) -> None:
    full, naive, rerank = summary.lines
    assert naive.timing == Times(0.2, 0.05, 0.05, 0.1, 1.0)
    assert naive.speedup == pytest.approx(2.0)  # of 4, 2 and 1.25; not 0.4 / 0.2 by chance alone
    assert (full.speedup, rerank.speedup) == pytest.approx((1.0, 0.2))
    assert (full.decode_tokens_per_s, naive.decode_tokens_per_s) == pytest.approx((12 / 2, 12 / 3))
    assert rerank.decode_tokens_per_s is None
    assert (naive.rows, naive.row_share, naive.bytes_read) == pytest.approx((8 / 3, 1 / 6, 30))
    assert (naive.peak_bytes, full.row_share) == (100, 1.0)


def test_kinds(summary: Summary) -> None:
    naive = summary.lines[1]
    assert naive.by_kind == {"x": clustered_mean([0.5, 1.0], [0, 1]), "y": clustered_mean([0.5], [0])}
    one_kind = summarise(made([[replace(row, kind="") for row in rows] for rows in ROWS]))
    assert one_kind.kinds == {} == one_kind.lines[1].by_kind


def test_same_answers_by_kind(summary: Summary) -> None:
    assert [line.same_by_kind for line in summary.lines] == [
        {"x": 1.0, "y": 1.0}, {"x": 0.5, "y": 1.0}, {"x": 1.0, "y": 1.0}
    ]  # fmt: skip


def test_another_metric_scores_all(summary: Summary) -> None:
    other = summarise(made(), "em")
    assert other.metric == "em" and [line.score.mean for line in other.lines] == [0, 0, 0]
    assert [line.kl for line in other.lines] == [line.kl for line in summary.lines]
    mixed = [[replace(result, metric="em" if result.id == "a" else "f1") for result in rows] for rows in ROWS]
    assert summarise(made(mixed)).metric == "score"
    assert [line.score.mean for line in summarise(made(mixed)).lines] == pytest.approx([1 / 6, 0.5, 0.0])
    with pytest.raises(InputError, match="metric 'bleu': must be one of f1, em, rouge_l, contains, json"):
        summarise(made(), "bleu")


def test_the_keys_of_the_json_are_a_contract(summary: Summary) -> None:
    report = summary.report()
    line = report["lines"][1]
    assert [list(values) for values in (report, line, line["score"], line["timing"])] == [
        ["title", "results", "header", "metric", "questions", "units", "skipped", "kinds",
             "tokens", "lines"],
        ["label", "algo", "params", "score", "difference", "lost", "won", "kl", "answer_kl",
         "same_answer", "agreement", "common_prefix", "rows", "row_share", "timing", "speedup", "decode_tokens_per_s",
         "peak_bytes", "bytes_read", "by_kind", "same_by_kind"],
        ["mean", "low", "high"],
        ["ttft_s", "load_s", "select_s", "recompute_s", "decode_s"],
    ]  # fmt: skip
