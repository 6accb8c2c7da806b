"""`pic bench`: `sync`, `context` and `breakdown`, from options to a result, a file, tables, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pictool.bench.options import ContextOptions, PromptOptions
from pictool.commands.benches import storage as bench_storage
from pictool.commands.benches.common import (
    DEFAULT_SHAPE,
    BenchOptions,
    SeedOption,
    head_line,
    make_report,
    model_line,
    number,
    open_subject,
    print_table,
    publish,
)
from pictool.commands.console.progress import progress
from pictool.commands.settings.options import ANSWER, PROMPT, SALT, command, make_app, option
from pictool.commands.settings.settings import Settings

if TYPE_CHECKING:
    from pictool.bench.breakdown import BreakdownResult, PolicyBreakdown
    from pictool.bench.context import ContextResult, Curve
    from pictool.bench.repeats import MedianRange
    from pictool.bench.roofline import Rates
    from pictool.bench.sync import MethodResult, SyncResult

DEFAULT_CONTEXT_SHAPE = "tiny"  # small enough that 32k tokens in full take seconds
SYNC_ALGOS = ("full", "naive", "legolink-16", "cacheblend-15")
CONTEXT_ALGOS = ("full", "legolink-16", "cacheblend-15", "naive")
BREAKDOWN_ALGOS = ("naive", "legolink-16", "cacheblend-15", "cacheblend-15:filter=single")

app = make_app("Measure speed, on models of any shape with random weights.")

RepeatsOption = Annotated[
    int, option("--repeats", "N", "Interleaved repeats, after a warm-up that does not count.", min=1)
]
ColdOption = Annotated[bool, option("--cold", None, "Read objects from the device, not from the page cache.")]
ChunksOption = Annotated[int, option("--chunks", "N", "Chunks in the prompt.", PROMPT, min=1)]
ChunkTokensOption = Annotated[int, option("--chunk-tokens", "N", "Tokens per chunk.", PROMPT, min=1)]
TailOption = Annotated[int, option("--tail-tokens", "N", "Tokens after the documents.", PROMPT, min=1)]


@command(app, "sync", "device", "dtype", "store", *SALT, without=["plot"])
def sync(
    common: BenchOptions,
    settings: Settings,
    repeats: RepeatsOption = 5,
    cold: ColdOption = False,
    seed: SeedOption = 0,
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    tail_tokens: TailOption = 32,
    new_tokens: Annotated[int, option("--new-tokens", "N", "Tokens to decode.", ANSWER, min=0)] = 16,
) -> None:
    """Measure TTFT, its parts, and decoding.

    One request comes after another; beside the policies, full recompute and transformers' generate are measured.

    \b
      pic bench sync --shape tiny --algo full --algo cacheblend:ratio=.05,.15
    """
    prompt = PromptOptions(
        chunks=chunks, chunk_tokens=chunk_tokens, tail_tokens=tail_tokens, new_tokens=new_tokens, repeats=repeats,
        seed=seed, is_cold=cold,
    )  # fmt: skip
    run_sync(common, prompt, settings)


@command(app, "context", "device", "dtype", "store", *SALT)
def context(
    common: BenchOptions,
    settings: Settings,
    repeats: RepeatsOption = 3,
    cold: ColdOption = False,
    seed: SeedOption = 0,
    start: Annotated[int, option("--from", "N", "Tokens of the shortest prompt.", PROMPT, min=1)] = 1024,
    stop: Annotated[int, option("--to", "N", "Double the length up to N tokens.", PROMPT, min=1)] = 32768,
    chunk_tokens: ChunkTokensOption = 512,
    tail_tokens: TailOption = 32,
) -> None:
    """Measure TTFT by the length of the context. Shows how it grows (EPIC, fig. 9).

    \b
      pic bench context --from 1024 --to 8192 --plot growth.svg
    """
    lengths = ContextOptions(
        start=start, stop=stop, chunk_tokens=chunk_tokens, tail_tokens=tail_tokens, repeats=repeats, seed=seed,
        is_cold=cold,
    )  # fmt: skip
    run_context(common, lengths, settings)


@command(app, "breakdown", "device", "dtype", "store", *SALT)
def breakdown(
    common: BenchOptions,
    settings: Settings,
    repeats: RepeatsOption = 3,
    cold: ColdOption = False,
    seed: SeedOption = 0,
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    tail_tokens: TailOption = 32,
) -> None:
    """Measure the parts of TTFT. Shows where the time to the first token goes (EPIC, fig. 10).

    \b
      pic bench breakdown --chunks 16 --plot parts.svg
    """
    prompt = PromptOptions(
        chunks=chunks, chunk_tokens=chunk_tokens, tail_tokens=tail_tokens, new_tokens=0, repeats=repeats, seed=seed,
        is_cold=cold,
    )  # fmt: skip
    run_breakdown(common, prompt, settings)


def run_sync(common: BenchOptions, options: PromptOptions, settings: Settings) -> None:
    with open_subject(common, settings, DEFAULT_SHAPE, SYNC_ALGOS, options.seed) as subject:
        from pictool.bench.sync import bench_sync

        with progress("linking", subject.num_links(options.repeats, subject.num_baselines)) as step:
            result = bench_sync(subject.model, subject.policies, options, subject.directory, step)
        report = make_report("sync", subject.model, options, result.report())
    publish(common, report, lambda: print_sync(result, report))


def run_context(common: BenchOptions, options: ContextOptions, settings: Settings) -> None:
    with open_subject(common, settings, DEFAULT_CONTEXT_SHAPE, CONTEXT_ALGOS, options.seed) as subject:
        from pictool.bench.context import bench_context

        num_links = subject.num_links(options.repeats, subject.num_baselines) * len(options.lengths)
        with progress("linking", num_links) as step:
            result = bench_context(subject.model, subject.policies, options, subject.directory, step)
        report = make_report("context", subject.model, options, result.report())
    publish(common, report, lambda: print_context(result, report))
    if common.plot:
        from pictool.bench.plot import plot_context

        title = f"{model_line(report)}, chunks of {options.chunk_tokens} tokens"
        plot_context(result, title, common.plot)


def run_breakdown(common: BenchOptions, options: PromptOptions, settings: Settings) -> None:
    with open_subject(common, settings, DEFAULT_SHAPE, BREAKDOWN_ALGOS, options.seed) as subject:
        from pictool.bench.breakdown import bench_breakdown

        with progress("linking", subject.num_links(options.repeats, 0)) as step:
            result = bench_breakdown(subject.model, subject.policies, options, subject.directory, step)
        report = make_report("breakdown", subject.model, options, result.report())
    publish(common, report, lambda: print_breakdown(result, report))
    if common.plot:
        from pictool.bench.plot import plot_breakdown

        title = f"{model_line(report)}, {options.chunks} chunks of {options.chunk_tokens} tokens"
        plot_breakdown(result, title, common.plot)


app.add_typer(bench_storage.app)


# Tables


def print_sync(result: SyncResult, report: dict[str, Any]) -> None:
    print(head_line(report))
    cold = "cold: read from their device" if report["options"]["is_cold"] else "warm: in the page cache"
    print(f"prompt of {result.prompt_tokens} tokens; objects of {result.object_bytes / 1e6:.1f} MB on disk, {cold}")
    columns = ["policy", "rows", "TTFT ms", "load", "select", "compute", "speedup", "prompt\n/ rows",
               "TTFT\n/ roofline", "tokens\n/ s", "MB\nread", "peak\nMB"]  # fmt: skip
    print_table(columns, [_sync_row(method) for method in result.methods])
    print(
        "Medians of the repeats; TTFT with the least and the most. speedup: full / it, median of the repeats' ratios."
    )
    if result.methods[0].floor_s is not None:
        print(roofline_line(result.rates))


def _sync_row(method: MethodResult) -> list[str]:
    median = method.median
    return [
        method.label, f"{method.samples[0].rows:.0f}", spread(method.ttft),
        *(number(median[name], 1e3) for name in ("load_s", "select_s", "recompute_s")),
        f"{method.speedup:.2f}x", f"{method.row_floor:.1f}x", number(method.ttft_by_floor, decimals=2),
        number(median["decode_tokens_per_s"]), number(median["bytes_read"], 1e-6), number(median["peak_bytes"], 1e-6),
    ]  # fmt: skip


def print_context(result: ContextResult, report: dict[str, Any]) -> None:
    print(head_line(report))
    lengths = [f"{tokens:,}" for tokens in result.lengths]
    print("TTFT in ms by tokens of the prompt, medians; exponents of TTFT over all lengths, over the longer half, and")
    print("of computing rows alone, with their standard errors")
    print_table(["policy", *lengths, "exponent", "longer half", "rows alone"], [_growth_row(curve, len(lengths))
                for curve in result.curves])  # fmt: skip
    if any(point.floor_s is not None for curve in result.curves for point in curve.points):
        print("TTFT / roofline")
        print_table(["policy", *lengths], [_roofline_row(curve, len(lengths)) for curve in result.curves])
        print(roofline_line(result.rates))


def _growth_row(curve: Curve, count: int) -> list[str]:
    growth = [str(fit or "-") for fit in (curve.ttft, curve.long_ttft, curve.recompute)]
    return [curve.label, *_cells([f"{point.ttft.median * 1e3:,.1f}" for point in curve.points], count, curve), *growth]


def _roofline_row(curve: Curve, count: int) -> list[str]:
    return [curve.label, *_cells([number(point.ttft_by_floor, decimals=2) for point in curve.points], count, curve)]


def _cells(known: Sequence[str], count: int, curve: Curve) -> list[str]:
    """What is known of a curve; after it, why there is no more."""
    left = count - len(known)
    return [*known, *["no memory"] * left] if curve.out_of_memory else [*known, *["-"] * left]


def print_breakdown(result: BreakdownResult, report: dict[str, Any]) -> None:
    print(head_line(report))
    print(f"prompt of {result.prompt_tokens} tokens; ms of each part (median) and its share of their sum")
    columns = ["policy", "TTFT ms", "load", "scoring", "select", "layer 0", "layer 1", "other layers", "logits",
               "other", "checks"]  # fmt: skip
    print_table(columns, [_breakdown_row(method) for method in result.methods])
    print("Layers are timed each for itself, with its check; checks: comparing and narrowing, of all layers together.")


def _breakdown_row(method: PolicyBreakdown) -> list[str]:
    parts = method.parts
    layers = [layer + check for layer, check in zip(parts.layers, parts.checks, strict=True)]
    seconds = [parts.load, parts.scoring, parts.select, sum(layers[:1]), sum(layers[1:2]), sum(layers[2:]),
               parts.logits, parts.other, sum(parts.checks)]  # fmt: skip
    return [method.label, spread(method.ttft), *(f"{value * 1e3:,.1f} {method.share(value):4.0%}" for value in seconds)]


def roofline_line(rates: Rates) -> str:
    gain = rates.bfloat16_flops_s / rates.flops_s
    told = f"\nProducts are {gain:.1f}x as fast in bfloat16, and objects half as large: --dtype bfloat16"
    return (
        f"roofline: the longer of bytes read / {rates.copy_bytes_s / 1e9:.1f} GB/s (copy, measured) and FLOPs of the "
        f"rows / {rates.flops_s / 1e12:.3g} TFLOP/s (matmul, measured){told if gain > 1 else ''}"
    )


def spread(times: MedianRange) -> str:
    """412.0 (405.1–431.2), in milliseconds."""
    return f"{times.median * 1e3:,.1f} ({times.low * 1e3:,.1f}–{times.high * 1e3:,.1f})"
