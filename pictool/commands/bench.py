"""`pic bench`: `sync` and `context`, from options to a result, a file, tables, a picture."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.bench.options import ContextOptions, PromptOptions
from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import output_path, print_json, write_json
from pictool.commands.console.progress import progress
from pictool.commands.console.verbosity import note
from pictool.commands.settings.engine import runnable
from pictool.commands.settings.options import (
    ANSWER,
    MODEL,
    OUTPUT,
    POLICY,
    PROMPT,
    SALT,
    SPECS,
    JsonOption,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store, quiet_libraries
from pictool.commands.settings.salt import without_salts
from pictool.commands.settings.settings import Settings

if TYPE_CHECKING:
    from pictool.bench.context import ContextResult, Curve
    from pictool.bench.repeats import MedianRange
    from pictool.bench.roofline import Rates
    from pictool.bench.sync import MethodResult, SyncResult
    from pictool.linker.grid import LabelledPolicy
    from pictool.runtime.model import Model

DEFAULT_SHAPE = "qwen2.5-0.5b"
DEFAULT_CONTEXT_SHAPE = "tiny"  # small enough that 32k tokens in full take seconds
SYNC_ALGOS = ("full", "naive", "legolink-16", "cacheblend-15")
CONTEXT_ALGOS = ("full", "legolink-16", "cacheblend-15", "naive")

app = make_app("Measure speed, on models of any shape with random weights.")

SeedOption = Annotated[int, option("--seed", "N", "Seed of weights and documents.", min=0)]
RepeatsOption = Annotated[
    int, option("--repeats", "N", "Interleaved repeats, after a warm-up that does not count.", min=1)
]
ColdOption = Annotated[bool, option("--cold", None, "Read objects from the device, not from the page cache.")]
ChunksOption = Annotated[int, option("--chunks", "N", "Chunks in the prompt.", PROMPT, min=1)]
ChunkTokensOption = Annotated[int, option("--chunk-tokens", "N", "Tokens per chunk.", PROMPT, min=1)]
TailOption = Annotated[int, option("--tail-tokens", "N", "Tokens after the documents.", PROMPT, min=1)]


@dataclass(frozen=True)
class BenchOptions:
    """The options that every bench has; None or empty where the user said nothing."""

    shape: Annotated[
        Optional[str],
        option(
            "--shape",
            "NAME",
            "Random-weight model of this shape: llama-3.1-8b, tiny, ... A wrong name lists all.",
            MODEL,
        ),
    ] = None
    layers: Annotated[
        Optional[int],
        option("--layers", "N", "Use only N layers of the shape, if all do not fit in memory.", MODEL, min=1),
    ] = None
    model: Annotated[Optional[str], option("-m, --model", "NAME", "Measure this model instead of a shape.", MODEL)] = (
        None
    )
    threads: Annotated[Optional[int], option("--threads", "N", "CPU threads.", MODEL, min=1)] = None
    algo: Annotated[list[str], option("--algo", "SPEC", f"Policy: {SPECS}", POLICY)] = field(default_factory=list)
    output: Annotated[
        Optional[str],
        option("-o, --output", "FILE", "Write all measurements, with command and machine (JSON).", OUTPUT),
    ] = None
    plot: Annotated[Optional[str], option("--plot", "FILE", "Plot the result (.svg and .png).", OUTPUT)] = None
    as_json: JsonOption = False


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


@dataclass(frozen=True)
class Subject:
    """What is measured, and a directory for its objects that is removed afterwards."""

    model: Model
    policies: list[LabelledPolicy]
    directory: Path

    @property
    def num_baselines(self) -> int:
        """`full`, and transformers where it runs this model."""
        return 2 if self.model.is_of_transformers else 1

    def num_links(self, repeats: int, num_baselines: int) -> int:
        """How many links there will be; `full` may be among the policies already."""
        has_full = num_baselines > 0 and any(labelled.label == "full" for labelled in self.policies)
        return (len(self.policies) + num_baselines - has_full) * (repeats + 1)


@contextmanager
def open_subject(
    common: BenchOptions, settings: Settings, shape: str, algos: Sequence[str], seed: int
) -> Iterator[Subject]:
    """Open what the options name, or else a random model of `shape` under the policies `algos`.

    Raises:
        PicError: options that cannot be used, before anything long runs.
    """
    from pictool.linker.grid import parse_repeatable
    from pictool.runtime.model import require_name

    check_options(common)
    if common.model is not None:
        require_name(common.model)
    root = open_store(settings).root
    with of_command_line():
        policies = parse_repeatable(common.algo or algos)
    from pictool.bench.prompts import needs_speculative, with_speculative
    from pictool.store.scratch import nearest_directory, scratch_directory

    model = open_bench_model(common, settings, shape, seed)
    if not common.algo:
        policies = runnable(model, policies)
    with scratch_directory(nearest_directory(root)) as directory:
        if common.model is None and needs_speculative(policies):
            from pictool.bench.shapes import save_speculative

            policies = with_speculative(policies, save_speculative(common.shape or shape, f"{directory}/speculative"))
        yield Subject(model, policies, directory)


def check_options(common: BenchOptions) -> None:
    """Refuse what makes no sense, and outputs that cannot be written."""
    if common.shape is not None and common.model is not None:
        raise UsageError("--shape: cannot be combined with -m; leave one of them out")
    if common.layers is not None and common.model is not None:
        raise UsageError("--layers: cannot be combined with -m; leave one of them out")
    if common.shape is not None:
        from pictool.bench.shapes import shape_of

        with of_command_line():
            shape_of(common.shape)
    if common.output is not None:
        output_path("-o", common.output, [])
    if common.plot is not None:
        from pictool.bench.plot import picture_paths
        from pictool.trace.plots import require_matplotlib

        require_matplotlib()
        for path in picture_paths(common.plot):
            output_path("--plot", str(path), [])


def open_bench_model(common: BenchOptions, settings: Settings, shape: str, seed: int) -> Model:
    """The model that is measured, on as many threads as --threads says."""
    quiet_libraries()
    import torch

    from pictool.bench.shapes import random_model, shape_of

    if common.threads is not None:
        torch.set_num_threads(common.threads)
    if common.model is not None:
        return open_model(settings.override(model=common.model))
    name = shape_of(common.shape or shape).name
    note(f"making a random {name}")
    return random_model(name, settings.device, settings.dtype, seed, settings.salt, common.layers)


def make_report(bench: str, model: Model, options: Any, results: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints and `-o` writes."""
    from pictool.runtime.machine import machine

    return {
        "bench": bench,
        "command": command_line(),
        "machine": machine(),
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "dtype": model.dtype,
            "device": model.device,
        },
        "options": asdict(options),
        "results": results,
    }


def command_line() -> str:
    """How this process was started, without salts: `pic …`, or `python -m MODULE …`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["pic"] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *without_salts(sys.argv[1:])])


def publish(common: BenchOptions, report: dict[str, Any], print_tables: Callable[[], None]) -> None:
    """Write the file, then print tables or JSON."""
    if common.output is not None:
        write_json(common.output, report)
        note(f"wrote {common.output}")
    if common.as_json:
        print_json(report)
    else:
        print_tables()


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


def head_line(report: dict[str, Any]) -> str:
    machine, model = report["machine"], report["model"]
    where = machine["gpu"] if model["device"] != "cpu" else f"{machine['cpu']}, {threads_of(machine)}"
    return f"{model['name']} ({model['dtype']}) on {where}"


def model_line(report: dict[str, Any]) -> str:
    """The model and what it ran on, for a title."""
    machine, model = report["machine"], report["model"]
    where = machine["gpu"] if model["device"] != "cpu" else threads_of(machine)
    return f"{model['name']}, {model['dtype']}, {where}"


def threads_of(machine: dict[str, Any]) -> str:
    count: int = machine["threads"]
    return f"{count} thread" + "s" * (count != 1)


def number(value: float | None, scale: float = 1.0, decimals: int = 1) -> str:
    return "-" if value is None else f"{value * scale:,.{decimals}f}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is to the left, the others to the right."""
    from pictool.commands.console.terminal import LabelledTable, open_screen

    table = LabelledTable(columns)
    for row in rows:
        table.add_row(*row)
    open_screen().print(table)
