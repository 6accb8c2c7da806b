"""`pic bench`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from pictool.cli.options import DeviceOption, DtypeOption, JsonOption, StoreOption, reports_errors

bench_app = typer.Typer(
    rich_markup_mode=None, help="Measure speed, on models of any shape with random weights.", no_args_is_help=True
)

ShapeOption = Annotated[
    Optional[str],
    typer.Option("--shape", help="A random model: llama-3.1-8b, qwen2.5-0.5b, tiny …; a wrong name lists all."),
]
BenchModelOption = Annotated[Optional[str], typer.Option("-m", "--model", help="A model instead of a shape.")]
AlgoOption = Annotated[Optional[list[str]], typer.Option("--algo", help="legolink-16, cacheblend:ratio=.05,.15 …")]
ThreadsOption = Annotated[Optional[int], typer.Option("--threads", min=1, help="Of the CPU.")]
OutputOption = Annotated[Optional[str], typer.Option("-o", "--output", help="Write everything measured (JSON).")]
PlotOption = Annotated[Optional[str], typer.Option("--plot", help="Draw it (.svg and .png).")]
ChunksOption = Annotated[int, typer.Option("--chunks", min=1, help="Chunks of the prompt.")]
ChunkTokensOption = Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of a chunk.")]
TailOption = Annotated[int, typer.Option("--tail-tokens", min=1, help="Tokens behind the documents.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Rounds, after one that is not counted.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of weights and documents.")]
ColdOption = Annotated[bool, typer.Option("--cold", help="Read objects from the device, not from the page cache.")]


def register(app: typer.Typer) -> None:
    app.add_typer(bench_app, name="bench")


@bench_app.command("sync")
@reports_errors
def sync_command(
    shape: ShapeOption = None,
    model: BenchModelOption = None,
    algo: AlgoOption = None,
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    tail_tokens: TailOption = 32,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=0, help="Tokens that are decoded.")] = 16,
    repeats: RepeatsOption = 5,
    cold: ColdOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    output: OutputOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """One request after another: TTFT, its parts, decoding; beside full and transformers' generate."""
    from pictool.bench.options import PromptOptions
    from pictool.commands.bench import BenchOptions, run_sync

    common = BenchOptions(shape, model, algo or [], device, dtype, store, threads, output, None, as_json)
    run_sync(common, PromptOptions(chunks, chunk_tokens, tail_tokens, new_tokens, repeats, seed, cold))


@bench_app.command("context")
@reports_errors
def context_command(
    shape: ShapeOption = None,
    model: BenchModelOption = None,
    algo: AlgoOption = None,
    start: Annotated[int, typer.Option("--from", min=1, help="Tokens of the shortest prompt.")] = 1024,
    stop: Annotated[int, typer.Option("--to", min=1, help="Doubled up to so many.")] = 32768,
    chunk_tokens: ChunkTokensOption = 512,
    tail_tokens: TailOption = 32,
    repeats: RepeatsOption = 3,
    cold: ColdOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    output: OutputOption = None,
    plot: PlotOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """TTFT over the length of the context, and how it grows (EPIC, fig. 9)."""
    from pictool.bench.options import ContextOptions
    from pictool.commands.bench import BenchOptions, run_context

    common = BenchOptions(shape, model, algo or [], device, dtype, store, threads, output, plot, as_json)
    run_context(common, ContextOptions(start, stop, chunk_tokens, tail_tokens, repeats, seed, cold))


@bench_app.command("breakdown")
@reports_errors
def breakdown_command(
    shape: ShapeOption = None,
    model: BenchModelOption = None,
    algo: AlgoOption = None,
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    tail_tokens: TailOption = 32,
    repeats: RepeatsOption = 3,
    cold: ColdOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    output: OutputOption = None,
    plot: PlotOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where the time to the first token goes (EPIC, fig. 10)."""
    from pictool.bench.options import PromptOptions
    from pictool.commands.bench import BenchOptions, run_breakdown

    common = BenchOptions(shape, model, algo or [], device, dtype, store, threads, output, plot, as_json)
    run_breakdown(common, PromptOptions(chunks, chunk_tokens, tail_tokens, 0, repeats, seed, cold))


@bench_app.command("async")
@reports_errors
def async_command(
    shape: ShapeOption = None,
    model: BenchModelOption = None,
    algo: AlgoOption = None,
    rate: Annotated[str, typer.Option("--rate", help="Requests a second, over all users; a list.")] = "0.5,1,2,4",
    users: Annotated[
        Optional[str], typer.Option("--users", help="Users with documents of their own (4); a list.")
    ] = None,
    ccr: Annotated[Optional[str], typer.Option("--ccr", help="Users by context cache ratio instead; a list.")] = None,
    memory: Annotated[
        Optional[int], typer.Option("--memory", min=1, help="Bytes that the ratio is of (the device's memory).")
    ] = None,
    duration: Annotated[float, typer.Option("--duration", help="Seconds of arrivals.")] = 40.0,
    requests: Annotated[
        Optional[int], typer.Option("--requests", min=1, help="So many, however long it takes.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Draws of arrivals.")] = 5,
    measured: Annotated[
        Optional[int], typer.Option("--measured", min=0, help="Requests executed per policy (20); 0: all.")
    ] = None,
    chunks: Annotated[Optional[int], typer.Option("--chunks", min=1, help="Chunks of a prompt (8).")] = None,
    chunk_tokens: Annotated[
        Optional[int], typer.Option("--chunk-tokens", min=1, help="Tokens of a chunk (512).")
    ] = None,
    tail_tokens: Annotated[Optional[int], typer.Option("--tail-tokens", min=1, help="Tokens behind them (32).")] = None,
    new_tokens: Annotated[Optional[int], typer.Option("--new-tokens", min=1, help="Tokens decoded (16).")] = None,
    dataset: Annotated[Optional[str], typer.Option("--dataset", help="Real questions: adds goodput.")] = None,
    params: Annotated[Optional[list[str]], typer.Option("-p", help="FIELD=VALUE: any field of the dataset.")] = None,
    gamma_share: Annotated[
        Optional[float], typer.Option("--gamma-share", help="Good: at least this share of full's mean score (0.8).")
    ] = None,
    skip_long: Annotated[bool, typer.Option("--skip-long", help="Leave out what does not fit the model.")] = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    output: OutputOption = None,
    plot: PlotOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Poisson arrivals of several users' requests: TTFT, throughput, goodput (EPIC, fig. 8)."""
    from pictool.commands.bench import BenchOptions
    from pictool.commands.bench_load import AsyncOptions, run_async

    common = BenchOptions(shape, model, algo or [], device, dtype, store, threads, output, plot, as_json)
    options = AsyncOptions(
        rate, users, ccr, memory, duration, requests, repeats, measured, seed, chunks, chunk_tokens, tail_tokens,
        new_tokens, dataset, params or [], gamma_share, skip_long,
    )  # fmt: skip
    run_async(common, options)


@bench_app.command("storage")
@reports_errors
def storage_command(
    shape: ShapeOption = None,
    model: BenchModelOption = None,
    mb: Annotated[Optional[str], typer.Option("--mb", help="Sizes of objects in MB (1,16,128); a list.")] = None,
    tokens: Annotated[Optional[str], typer.Option("--tokens", help="Sizes in tokens of the model; a list.")] = None,
    objects: Annotated[int, typer.Option("--objects", min=1, help="Objects of each size.")] = 8,
    geometry: Annotated[
        Optional[str], typer.Option("--geometry", help="LAYERS,KV_HEADS,HEAD_DIM instead of a model's.")
    ] = None,
    repeats: RepeatsOption = 5,
    seed: SeedOption = 0,
    output: OutputOption = None,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write, read and verify objects; beside the disk's and the memory's own rates."""
    from pictool.commands.bench import BenchOptions
    from pictool.commands.bench_load import StorageOptions, run_storage

    common = BenchOptions(shape, model, [], None, dtype, store, None, output, None, as_json)
    run_storage(common, StorageOptions(mb, tokens, objects, geometry, repeats, seed))
