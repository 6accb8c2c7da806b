"""The figures of the paper on span queries: options, a result, a file, tables, a picture.

python -m benchmarks.span_queries judge --fan-out 1,24 --samples 20
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from benchmarks.span_queries.options import (
    BulkOptions,
    DocumentsOptions,
    JudgeOptions,
    MovesOptions,
    PoolOptions,
    TreeOptions,
)
from benchmarks.subject import (
    BenchOptions,
    SeedOption,
    head_line,
    make_report,
    model_line,
    open_subject,
    publish,
)
from pictool.commands.bench import print_table
from pictool.commands.console.errors import UsageError
from pictool.commands.console.progress import progress
from pictool.commands.settings.options import DATASET, PROMPT, SALT, command, make_app, option
from pictool.commands.settings.settings import Settings

if TYPE_CHECKING:
    from benchmarks.span_queries.bulk import BulkResult
    from benchmarks.span_queries.documents import DocumentsPoint
    from benchmarks.span_queries.judge import JudgeResult, Percentiles
    from benchmarks.span_queries.moves import MovesPoint
    from benchmarks.span_queries.pool import PoolPoint
    from benchmarks.span_queries.quality import Quality
    from benchmarks.span_queries.tree import TreePoint
    from benchmarks.span_queries.waves import WavePoint

ALGOS = ("naive", "legolink-16")
LONG_SHAPE, SHAPE = "tiny", "small"  # of long prompts; of all else

app = make_app("Measure span queries: documents, judges, moves, pools, bulks, trees.")

RepeatsOption = Annotated[int, option("--repeats", "N", "Times that each is run.", min=1)]
QuestionsOption = Annotated[int, option("--questions", "N", "Questions that quality is measured by.", min=1)]
_QUERY = ("device", "dtype", "store", *SALT)


def numbers(option: str, text: str, kind: type[int] | type[float] = float) -> tuple[Any, ...]:
    """The numbers of a list that is separated by commas.

    Raises:
        UsageError: something in it is none.
    """
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        whole = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} {text!r}: must be {whole}, separated by commas") from error
    if not all(map(math.isfinite, values)):
        raise UsageError(f"{option} {text!r}: must be finite")
    return values


@command(app, "documents", *_QUERY)
def documents(
    common: BenchOptions,
    settings: Settings,
    counts: Annotated[str, option("--documents", "LIST", "Documents of a query.", PROMPT)] = "1,2,4,8,16,32",
    tokens: Annotated[int, option("--tokens", "N", "Tokens of a document.", PROMPT, min=1)] = 2857,
    repeats: RepeatsOption = 3,
    questions: QuestionsOption = 60,
    seed: SeedOption = 0,
) -> None:
    """Measure TTFT by the number of documents: stock, a miss and a hit. Span queries, fig. 13b.

    \b
      python -m benchmarks.span_queries documents --documents 1,8 --tokens 512
    """
    options = DocumentsOptions(numbers("--documents", counts, int), tokens, repeats, questions, seed)
    with open_subject(common, settings, LONG_SHAPE, ALGOS, seed) as subject:
        from benchmarks.span_queries.documents import bench_documents, num_runs

        with progress("answering", num_runs(options, subject.policies)) as step:
            points = bench_documents(subject.model, subject.policies, options, subject.directory, step)
        report = make_report("query documents", subject.model, options, {"points": [p.report() for p in points]})
    publish(common, report, lambda: print_documents(points, report))
    if common.plot:
        from benchmarks.span_queries.plots import plot_documents

        plot_documents(points, f"{model_line(report)}, documents of {tokens} tokens", common.plot)


@command(app, "judge", *_QUERY)
def judge(
    common: BenchOptions,
    settings: Settings,
    fan_out: Annotated[str, option("--fan-out", "LIST", "Candidates of a judge.", PROMPT)] = "1,4,8,16,24",
    temperature: Annotated[
        str, option("--temperature", "LIST", "Of the calls that write candidates.", PROMPT)
    ] = "0,0.25,0.5,0.75,1",
    tokens: Annotated[int, option("--tokens", "N", "Tokens of a candidate.", PROMPT, min=1)] = 64,
    pool: Annotated[int, option("--pool", "N", "Candidates that are generated at each temperature.", min=1)] = 48,
    samples: Annotated[int, option("--samples", "N", "Judges at each temperature and fan-out.", min=1)] = 100,
    questions: QuestionsOption = 60,
    seed: SeedOption = 0,
) -> None:
    """Measure TTFT of a judge over candidates. By temperature and fan-out; p50 and p99 (figs. 14 and 15).

    \b
      python -m benchmarks.span_queries judge --fan-out 1,24 --samples 20
    """
    fan_outs, temperatures = numbers("--fan-out", fan_out, int), numbers("--temperature", temperature)
    options = JudgeOptions(fan_outs, temperatures, tokens, pool, samples, questions, seed)
    with open_subject(common, settings, SHAPE, ALGOS, seed) as subject:
        from benchmarks.span_queries.judge import bench_judge, num_runs

        with progress("judging", num_runs(options, subject.policies)) as step:
            result = bench_judge(subject.model, subject.policies, options, subject.directory, step)
        report = make_report("query judge", subject.model, options, result.report())
    publish(common, report, lambda: print_judge(result, report))
    if common.plot:
        from benchmarks.span_queries.plots import plot_judge

        plot_judge(result, options.middle, f"{model_line(report)}, candidates of {tokens} tokens", common.plot)


@command(app, "moves", *_QUERY, without=["algo"])
def moves(
    common: BenchOptions,
    settings: Settings,
    tokens: Annotated[str, option("--tokens", "LIST", "Tokens that are moved at once.")] = "1024,4096,16384,65536",
    batch: Annotated[str, option("--batch", "LIST", "Blocks of a batch.")] = "16,64,256",
    block: Annotated[int, option("--block", "N", "Tokens of a block.", min=1)] = 16,
    repeats: RepeatsOption = 5,
    seed: SeedOption = 0,
) -> None:
    """Measure how fast KV is moved in place by CIDRA. With scratch and duplicates (fig. 13a).

    \b
      python -m benchmarks.span_queries moves --tokens 4096 --batch 64
    """
    options = MovesOptions(
        numbers("--tokens", tokens, int), numbers("--batch", batch, int), block, repeats, seed
    )  # fmt: skip
    with open_subject(common, settings, SHAPE, ALGOS, seed) as subject:
        from benchmarks.span_queries.moves import bench_moves, num_runs

        with progress("moving", num_runs(options)) as step:
            points = bench_moves(subject.model, options, step)
        report = make_report("query moves", subject.model, options, {"points": [p.report() for p in points]})
    publish(common, report, lambda: print_moves(points, report))
    if common.plot:
        from benchmarks.span_queries.plots import plot_moves

        plot_moves(points, f"{model_line(report)}, blocks of {block} tokens", common.plot)


@command(app, "pool", *_QUERY)
def pool(
    common: BenchOptions,
    settings: Settings,
    documents: Annotated[int, option("--documents", "N", "Documents that there are.", PROMPT, min=1)] = 24,
    read: Annotated[int, option("--read", "N", "Documents of a request.", PROMPT, min=1)] = 6,
    tokens: Annotated[int, option("--tokens", "N", "Tokens of a document.", PROMPT, min=1)] = 512,
    share: Annotated[float, option("--pool-share", "SHARE", "Of all documents, what the pool holds.")] = 0.5,
    requests: Annotated[int, option("--requests", "N", "Requests of each stream.", min=1)] = 20,
    wave: Annotated[int, option("--wave", "N", "Requests that are linked by one plan; 0: none.", min=0)] = 4,
    seed: SeedOption = 0,
) -> None:
    """Measure links from a pool on the device. Beside links from files and from host memory; then in waves (§5.5).

    \b
      python -m benchmarks.span_queries pool --documents 12 --read 4
    """
    options = PoolOptions(documents, read, tokens, share, requests, seed, wave)
    with open_subject(common, settings, SHAPE, ALGOS, seed) as subject:
        from benchmarks.span_queries import pool as alone
        from benchmarks.span_queries import waves as together

        num_runs = alone.num_runs(options, subject.policies) + together.num_runs(options, subject.policies)
        with progress("linking", num_runs) as step:
            points = alone.bench_pool(subject.model, subject.policies, options, subject.directory, step)
            waves = together.bench_waves(subject.model, subject.policies, options, subject.directory, step)
        results = {"points": [p.report() for p in points], "waves": [w.report() for w in waves]}
        report = make_report("query pool", subject.model, options, results)
    publish(common, report, lambda: print_pool(points, waves, report))
    if common.plot:
        from benchmarks.span_queries.plots import plot_pool

        plot_pool(points, f"{model_line(report)}, prompts of {points[0].tokens:,} tokens", common.plot)


@command(app, "bulk", *_QUERY)
def bulk(
    common: BenchOptions,
    settings: Settings,
    dataset: Annotated[str, option("--dataset", "NAME", "world, or a file of questions.", DATASET)] = "world",
    sizes: Annotated[str, option("--bulk", "LIST", "Queries of a bulk; 0: all.")] = "1,64,0",
    share: Annotated[float, option("--cache-share", "SHARE", "What of all documents a cache holds.")] = 0.125,
    limit: Annotated[int, option("--limit", "N", "Queries at most.", DATASET, min=1)] = 150,
    repeats: RepeatsOption = 2,
    seed: SeedOption = 0,
) -> None:
    """Measure bulks of queries. In an order in which shared texts meet, beside a prefix cache (table 4).

    \b
      python -m benchmarks.span_queries bulk --dataset musique_s.json --bulk 1,0
    """
    options = BulkOptions(numbers("--bulk", sizes, int), share, limit, repeats, seed)
    from benchmarks.questions.world import World
    from benchmarks.span_queries.bulk import bench_bulk, num_runs
    from pictool.eval.datasets import open_dataset

    opened = World(prompts=limit // 5 + 1) if dataset == "world" else open_dataset(dataset, {})
    with open_subject(common, settings, SHAPE, ALGOS, seed) as subject:
        with progress("answering", num_runs(options, subject.policies, limit)) as step:
            result = bench_bulk(subject.model, subject.policies, opened, options, subject.directory, step)
        report = make_report("query bulk", subject.model, options, result.report())
    publish(common, report, lambda: print_bulk(result, report))
    if common.plot:
        from benchmarks.span_queries.plots import plot_bulk

        plot_bulk(result, f"{model_line(report)}, {dataset}", common.plot)


@command(app, "tree", *_QUERY)
def tree(
    common: BenchOptions,
    settings: Settings,
    hay: Annotated[str, option("--hay", "LIST", "Tokens of hay around a candidate.", PROMPT)] = "0,32,64,128,256,512",
    candidates: Annotated[int, option("--candidates", "N", "Candidates of a judge.", PROMPT, min=2)] = 8,
    arity: Annotated[int, option("--arity", "N", "What an inner call of a tree reads.", PROMPT, min=2)] = 2,
    runs: Annotated[int, option("--runs", "N", "Prompts of each length.", min=1)] = 100,
    seed: SeedOption = 0,
) -> None:
    """Measure answers of one judge against trees of calls. On the embedded world (figs. 16 and 17).

    \b
      python -m benchmarks.span_queries tree --hay 0,256 --runs 20
    """
    options = TreeOptions(numbers("--hay", hay, int), candidates, arity, runs, seed)
    from dataclasses import replace

    from benchmarks.span_queries.tree import bench_tree, num_runs
    from pictool.store.store import Store

    if common.shape is None and common.model is None:
        common = replace(common, model=settings.model or "embedded")  # one that can answer
    with open_subject(common, settings, SHAPE, ("full", "legolink-16"), seed) as subject:
        with progress("answering", num_runs(options, subject.policies)) as step:
            store = Store(subject.directory / "objects")
            points = bench_tree(subject.model, subject.policies, options, store, step)
        report = make_report("query tree", subject.model, options, {"points": [p.report() for p in points]})
    publish(common, report, lambda: print_tree(points, report))
    if common.plot:
        from benchmarks.span_queries.plots import plot_tree

        plot_tree(points, f"{model_line(report)}, {candidates} candidates", common.plot)


# Tables


def print_documents(points: Sequence[DocumentsPoint], report: dict[str, Any]) -> None:
    print(head_line(report))
    labels = [measured.label for measured in points[0].measured]
    print("TTFT in ms, medians; in brackets the speedup over stock, median of the repeats' ratios")
    print_table(["documents", "tokens", *labels], [
        [str(point.documents), f"{point.prompt_tokens:,}",
         *(f"{own.ttft.median * 1e3:,.1f} ({own.speedup:.1f}x)" for own in point.measured)]
        for point in points
    ])  # fmt: skip
    print("the embedded model's answers over as many pages")
    print_quality([(str(point.documents), point.quality) for point in points], "pages")


def print_quality(rows: Sequence[tuple[str, Sequence[Quality]]], what: str) -> None:
    """Right answers, and how far the first token's distribution is from that of full."""
    columns = [what, "policy", "questions", "right", "KL mean", "median"]
    print_table(columns, [
        [name, own.label, str(own.cases), f"{own.right:.0%}", f"{own.kl_mean:.3f}", f"{own.kl_median:.3f}"]
        for name, quality in rows for own in quality
    ])  # fmt: skip


def print_judge(result: JudgeResult, report: dict[str, Any]) -> None:
    print(head_line(report))
    labels = list(result.points[0].ttft)
    print("TTFT of the judge in ms, p50 / p99; in brackets the speedup over stock, p50 / p1 of its samples")
    print_table(["temperature", "fan-out", "tokens", *labels], [
        [f"{point.temperature:g}", str(point.fan_out), f"{point.prompt_tokens:,.0f}",
         *(_judge_cell(point.ttft[label], point.speedup[label]) for label in labels)]
        for point in result.points
    ])  # fmt: skip
    print("the embedded model's judges over 6 pages and 5 candidates")
    print_quality([("judge", result.quality)], "query")


def _judge_cell(ttft: Percentiles, speedup: Percentiles) -> str:
    return f"{ttft.p50 * 1e3:,.1f} / {ttft.p99 * 1e3:,.1f} ({speedup.p50:.1f}x / {speedup.p1:.1f}x)"


def print_moves(points: Sequence[MovesPoint], report: dict[str, Any]) -> None:
    print(head_line(report))
    columns = ["moves", "tokens", "batch", "tokens/ms", "least", "most", "batches", "duplicates", "scratch blocks"]
    print_table(columns, [
        [point.kind, f"{point.tokens:,}", str(point.batch or "-"),
         *(f"{rate:,.0f}" for rate in (point.tokens_per_ms.median, point.tokens_per_ms.low, point.tokens_per_ms.high)),
         str(point.batches), str(point.duplicates), str(point.scratch)]
        for point in points
    ])  # fmt: skip


def print_pool(points: Sequence[PoolPoint], waves: Sequence[WavePoint], report: dict[str, Any]) -> None:
    print(head_line(report))
    print("TTFT in ms, medians; speedup: host memory's ÷ the pool's, median of the requests' ratios; MB from the host")
    places = list(points[0].ttft)
    columns = ["policy", "stream", *places, "speedup", "MB, memory", "MB, pool", "resident", "stayed", "tokens/ms",
               "duplicates", "scratch"]  # fmt: skip
    print_table(columns, [
        [point.label, point.stream, *(f"{point.ttft[place].median * 1e3:,.1f}" for place in places),
         f"{point.speedup:.2f}x", f"{point.copied['memory'] / 1e6:,.1f}", f"{point.copied['pool'] / 1e6:,.1f}",
         f"{point.resident:.0%}", f"{point.stayed:.0%}",
         "-" if point.tokens_per_ms is None else f"{point.tokens_per_ms.median:,.0f}",
         str(point.duplicates), f"{point.scratch:,}"]
        for point in points
    ])  # fmt: skip
    if waves:
        print_waves(waves)


def print_waves(points: Sequence[WavePoint]) -> None:
    print(f"ms of {points[0].requests} requests: from host memory; from the pool with a plan for each; with one plan")
    columns = ["policy", "stream", *points[0].seconds, "speedup over each", "plans", "together", "MB from the host",
               "moves", "tokens moved", "tokens/ms", "duplicates", "scratch KB"]  # fmt: skip
    print_table(columns, [
        [point.label, point.stream, *(f"{own.median * 1e3:,.1f}" for own in point.seconds.values()),
         f"{point.speedup:.2f}x", way, f"{point.together[way]:.1f}", f"{point.copied[way] / 1e6:,.1f}",
         f"{point.moves[way]:.1f}", f"{point.moved[way]:,.0f}",
         "-" if (rate := point.tokens_per_ms[way]) is None else f"{rate.median:,.0f}",
         str(point.duplicates[way]), f"{point.scratch_bytes[way] / 1e3:,.0f}"]
        for point in points for way in point.moves
    ])  # fmt: skip


def print_bulk(result: BulkResult, report: dict[str, Any]) -> None:
    print(head_line(report))
    print(
        f"{result.queries} queries of {result.dataset}: {result.documents} documents, {result.distinct} of them "
        f"different, {result.tokens:,} tokens; caches of {result.capacity / 1e6:.1f} MB"
    )
    columns = ["policy", "bulk", "mean TTFT ms", "sooner than stock", "least", "most", "expected hits", "hits"]
    print_table(columns, [
        [row.label, str(row.size or "all"), f"{row.ttft.median * 1e3:,.1f}", f"{row.speedup.median:.2f}x",
         f"{row.speedup.low:.2f}x", f"{row.speedup.high:.2f}x", f"{row.expected_hits:.0%}", f"{row.hits:.0%}"]
        for row in result.rows
    ])  # fmt: skip


def print_tree(points: Sequence[TreePoint], report: dict[str, Any]) -> None:
    print(head_line(report))
    names = list(points[0].right)
    print_table(["policy", "hay", "tokens, flat", "prompts", *(f"right, {name}" for name in names)], [
        [point.label, str(point.hay), f"{point.tokens:,.0f}", str(point.runs),
         *(f"{point.right[name]:.0%}" for name in names)]
        for point in points
    ])  # fmt: skip


if __name__ == "__main__":
    app()
