"""`python -m benchmarks.span_queries`: what is measured is what it says; no time is asserted."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands.run import run_app

from benchmarks.questions.world import World
from benchmarks.span_queries import bulk, documents, judge, moves, pool, tree, waves
from benchmarks.span_queries.__main__ import app
from benchmarks.span_queries.bulk import bench_bulk, bulk_order
from benchmarks.span_queries.documents import bench_documents
from benchmarks.span_queries.judge import bench_judge
from benchmarks.span_queries.moves import KINDS, LINK, bench_moves, moves_of
from benchmarks.span_queries.options import (
    BulkOptions,
    DocumentsOptions,
    JudgeOptions,
    MovesOptions,
    PoolOptions,
    TreeOptions,
)
from benchmarks.span_queries.pool import STREAMS, bench_pool
from benchmarks.span_queries.tree import bench_tree, queries_over, write_haystack
from benchmarks.span_queries.waves import bench_waves
from pictool.linker.grid import parse_grid
from pictool.runtime.model import Model, load_model
from pictool.spans.optimise import shape
from pictool.spans.query import nodes
from pictool.store.store import Store

POLICIES = parse_grid(["naive", "legolink-4"])


class Steps:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_documents_are_measured_stock_missed_and_hit(model: Model, tmp_path: Path) -> None:
    options, steps = DocumentsOptions((1, 3), tokens=20, repeats=2, questions=2), Steps()
    points = bench_documents(model, POLICIES, options, tmp_path, steps)
    assert steps.count == documents.num_runs(options, POLICIES)
    assert [(point.documents, point.prompt_tokens) for point in points] == [(1, 52), (3, 92)]
    labels = ["stock", "naive, miss", "naive, hit", "legolink-4, miss", "legolink-4, hit"]
    for point in points:
        assert [own.label for own in point.measured] == labels
        assert all(len(own.samples) == 2 and min(own.samples) > 0 for own in point.measured)
        stock = point.measured[0].samples
        assert point.measured[2].speedup == statistics.median(
            theirs / own for theirs, own in zip(stock, point.measured[2].samples, strict=True)
        )
        full, naive, _ = point.quality
        assert (full.label, full.kl_mean, full.cases) == ("full", 0.0, 2) and naive.kl_mean >= 0
    assert points[0].quality[1].kl_mean < 1e-3  # one document: nothing was missing but the BOS token


def test_a_judge_reads_what_inner_calls_generated(model: Model, tmp_path: Path) -> None:
    options = JudgeOptions((1, 3), (0.0, 2.0, 3.0), tokens=6, pool=5, samples=3, questions=1)
    steps = Steps()
    result = bench_judge(model, POLICIES, options, tmp_path, steps)
    assert steps.count == judge.num_runs(options, POLICIES)
    assert [(point.temperature, point.fan_out) for point in result.points] == list(options.grid)
    for point in result.points:
        assert (point.distinct == 1) == (point.temperature == 0)
        assert set(point.samples) == set(point.speedup) == {"stock", "naive", "legolink-4"}
        assert all(len(values) == 3 for values in point.samples.values())
        assert point.ttft["naive"].p1 <= point.ttft["naive"].p50 <= point.ttft["naive"].p99
        assert point.speedup["stock"].p50 == 1
    by_fan_out = {point.fan_out: point.prompt_tokens for point in result.points}
    assert 2 * (6 + 1) <= by_fan_out[3] - by_fan_out[1] <= 2 * (6 + 2)
    assert [quality.label for quality in result.quality] == ["full", "naive", "legolink-4"]


def test_moves_are_what_their_names_say(model: Model) -> None:
    options, steps = MovesOptions((64,), (2, 16), block=8, repeats=1), Steps()
    points = bench_moves(model, options, steps)
    assert steps.count == moves.num_runs(options) and [point.kind for point in points] == [
        *sorted(KINDS * 2, key=KINDS.index),
        LINK,
    ]
    by_kind = {(point.kind, point.batch): point for point in points}
    assert by_kind["permutation", 16].scratch == 0 == by_kind["overlap", 2].scratch
    assert by_kind["duplicates", 16].duplicates == 4 and by_kind["duplicates", 16].moves == 8
    assert all(point.tokens_per_ms.median > 0 for point in points) and by_kind[LINK, 0].tokens == 64
    moved = moves_of("permutation", 9, MovesOptions(block=1))
    assert sorted(move.target for move in moved) == sorted(move.source for move in moved) == list(range(9))


def test_streams_meet_the_pool_as_their_names_say(model: Model, tmp_path: Path) -> None:
    options, steps = PoolOptions(documents=6, read=3, tokens=16, requests=5), Steps()
    points = {point.stream: point for point in bench_pool(model, POLICIES[:1], options, tmp_path, steps)}
    assert steps.count == pool.num_runs(options, POLICIES[:1])
    same, shuffled, drawn = (points[stream] for stream in STREAMS)
    assert (same.resident, same.stayed, same.tokens_per_ms) == (1, 1, None) and same.copied["pool"] == 0
    assert shuffled.resident == 1 > shuffled.stayed and shuffled.copied["pool"] == 0 < shuffled.copied["memory"]
    assert 0 < drawn.resident < 1 and 0 < drawn.copied["pool"] < drawn.copied["memory"] and drawn.scratch > 0

    options, steps = replace(options, requests=6, wave=3), Steps()
    together = {point.stream: point for point in bench_waves(model, POLICIES[:1], options, tmp_path, steps)}
    assert steps.count == waves.num_runs(options, POLICIES[:1]) == 3 * 3
    alike, mixed, picked = (together[stream] for stream in STREAMS)
    assert alike.together == {"each": 1, "wave": 1} and alike.moves == {"each": 0, "wave": 0}
    assert mixed.together["wave"] > 1 and mixed.copied["wave"] == 0 == mixed.copied["each"]
    assert picked.together["wave"] > 1 and picked.duplicates["wave"] > 0 and picked.scratch_bytes["wave"] > 0
    assert not waves.num_runs(replace(options, wave=0), POLICIES)


def test_bulks_are_ordered_within_themselves_and_cached_as_expected(model: Model, tmp_path: Path) -> None:
    options, steps = BulkOptions((1, 0), share=0.3, limit=10, repeats=1), Steps()
    dataset = World(prompts=4, chunks=2, per_kind=1)
    result = bench_bulk(model, POLICIES, dataset, options, tmp_path, steps)
    assert steps.count == bulk.num_runs(options, POLICIES, result.queries)
    assert (result.documents, result.distinct) == (2 * result.queries, 8)
    stock, *rows = result.rows
    assert stock.speedup.median == 1 and len(rows) == 4
    by_size = {(row.label, row.size): row for row in rows}
    for label in ("naive", "legolink-4"):
        one, every = by_size[label, 1], by_size[label, 0]
        assert one.hits < every.hits and one.expected_hits < every.expected_hits
        assert every.hits == pytest.approx(every.expected_hits, abs=0.15)  # the store's own overhead moves evictions
    assert list(tmp_path.iterdir()) == []


def test_a_bulk_stays_where_it_is_in_the_order() -> None:
    rng = random.Random(1)
    items = [dict.fromkeys(rng.sample("abcdef", 2), 1) for _ in range(10)]
    assert bulk_order(items, 1, 4) == list(range(10))
    by_four = bulk_order(items, 4, 4)
    assert [sorted(by_four[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sorted(bulk_order(items, 0, 4)) == list(range(10))


def test_a_tree_keeps_what_a_flat_judge_loses(tmp_path: Path) -> None:
    """On the embedded model: facts are copied, of two candidates at a time, out of hay that a flat judge is lost in."""
    embedded = load_model("embedded", "cpu")
    options, steps = TreeOptions((400,), runs=4, seed=1), Steps()
    full = parse_grid(["full"])
    (point,) = bench_tree(embedded, full, options, Store(tmp_path), steps)
    assert steps.count == tree.num_runs(options, full)
    assert point.right["extract"] == 1.0 > point.right["flat"] and point.tokens > 3000


def test_the_three_queries_read_the_same_candidates() -> None:
    model = load_model("embedded", "cpu")
    stack = write_haystack(model, 20, TreeOptions(candidates=4), 3)
    assert stack == write_haystack(model, 20, TreeOptions(candidates=4), 3) and len(set(stack.pages)) == 4
    for page, stem, end in zip(stack.pages, stack.stems, stack.ends, strict=True):
        assert stem in page and end in page and page.endswith("\n")
    assert f"{stack.stems[stack.asked]} {stack.answer}{stack.ends[stack.asked]}" in stack.pages[stack.asked]
    queries = queries_over(stack, 2)
    assert shape(queries["flat"]) == "G(⋈(+(F, F, F, F), U))"
    assert shape(queries["tree"]) == "G(⋈(+(G(⋈(+(F, F), U)), G(⋈(+(F, F), U))), U))"
    one = "seq(A, G(⋈(+(F, F), U)), U)"
    assert shape(queries["extract"]) == f"G(⋈(+({', '.join([one] * 4)}), U))"
    assert sum(node.kind == "file" for _, node in nodes(queries["extract"])) == 8


RUNS: dict[str, list[Any]] = {
    "documents": ["--documents", "1,2", "--tokens", 12, "--repeats", 1, "--questions", 1],
    "judge": ["--fan-out", "1,2", "--temperature", "0,1", "--tokens", 3, "--pool", 2, "--samples", 1, "--questions", 1],
    "moves": ["--tokens", 64, "--batch", "2,4", "--repeats", 1],
    "pool": ["--documents", 4, "--read", 2, "--tokens", 12, "--requests", 2],
    "bulk": ["--limit", 4, "--bulk", "1,0", "--repeats", 1],
    "tree": ["-m", "embedded", "--hay", "0,10", "--candidates", 3, "--runs", 1],
}


@pytest.mark.parametrize("name", RUNS)
def test_tables_json_and_pictures(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shape = [] if name == "tree" else ["--shape", "tiny"]
    algo = [] if name == "moves" else ["--algo", "naive"]
    outcome = run_app(app, name, *RUNS[name], *shape, *algo, "-o", "out.json", "--plot", "out.svg", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert ("embedded" if name == "tree" else "random tiny") in outcome.out and "…" not in outcome.out
    report = json.loads(Path("out.json").read_text())
    assert report["bench"] == f"query {name}" and report["machine"]["cpu"] and report["results"]
    assert Path("out.png").stat().st_size > 5000 and Path("out.svg").read_text().startswith("<?xml")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".pic-scratch")]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["documents", "--documents", "1,x"], 2, "--documents '1,x': must be whole numbers"),
        (["documents", "--documents", "33"], 1, "--documents 33: must be 32 at most"),
        (["documents", "--documents", "0"], 1, "--documents 0: must be 1 or more"),
        (["documents", "--tokens", "300", "-m", "embedded"], 1, "a prompt of 9632 tokens, but embedded"),
        (["judge", "--temperature", "-1"], 1, "--temperature: must be from 0 to 100"),
        (["moves", "--tokens", "8"], 1, "--tokens 8: must be 16 or more"),
        (["pool", "--read", "3", "--documents", "2"], 1, "--read 3: must be from 1 to --documents 2"),
        (["bulk", "--cache-share", "0"], 1, "--cache-share 0.0: "),
        (["bulk", "--dataset", "no.json"], 1, "dataset 'no.json': is neither a file nor one of"),
        (["tree", "--arity", "9"], 1, "--candidates: from 2 to 16, and --arity from 2 to as many"),
    ],
)
def test_mistakes_are_told_in_one_line(options: list[str], code: int, message: str) -> None:
    outcome = run_app(app, *options)
    assert outcome.code == code and f"pic: error: {message}" in outcome.err
    assert outcome.err.count("pic: error:") == 1
