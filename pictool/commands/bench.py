"""`pic bench`: what one request takes under each policy, beside full recompute and transformers' own `generate`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.bench.options import PromptOptions
from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import print_json
from pictool.commands.console.progress import progress
from pictool.commands.console.verbosity import note
from pictool.commands.settings.engine import runnable
from pictool.commands.settings.options import (
    ANSWER,
    MODEL,
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
    from pictool.bench.sync import MethodResult, SyncResult
    from pictool.linker.grid import LabelledPolicy
    from pictool.runtime.model import Model

DEFAULT_SHAPE = "qwen2.5-0.5b"
DEFAULT_POLICIES = ("full", "auto", "naive", "legolink-16", "cacheblend-15")

ShapeOption = Annotated[
    Optional[str],
    option(
        "--shape", "NAME", "Use random weights of this shape: llama-3.1-8b, tiny, ... An unknown name lists all.", MODEL
    ),
]
ModelOption = Annotated[Optional[str], option("-m, --model", "NAME", "Measure this model instead of a shape.", MODEL)]
AlgosOption = Annotated[list[str], option("--algo", "SPEC", f"Policy: {SPECS}", POLICY)]

app = make_app()


@dataclass(frozen=True)
class BenchOptions:
    """The options of `pic bench`; None or empty where the user said nothing."""

    shape: ShapeOption = None
    model: ModelOption = None
    algo: AlgosOption = field(default_factory=list)
    repeats: Annotated[
        int, option("--repeats", "N", "Interleaved repeats, after one warm-up that is not counted.", min=1)
    ] = 5
    cold: Annotated[bool, option("--cold", None, "Read objects from disk, not from the page cache.")] = False
    chunks: Annotated[int, option("--chunks", "N", "Chunks in the prompt.", PROMPT, min=1)] = 8
    chunk_tokens: Annotated[int, option("--chunk-tokens", "N", "Tokens per chunk.", PROMPT, min=1)] = 512
    new_tokens: Annotated[int, option("--new-tokens", "N", "Tokens to decode.", ANSWER, min=0)] = 16
    as_json: JsonOption = False

    @property
    def prompt(self) -> PromptOptions:
        return PromptOptions(
            chunks=self.chunks, chunk_tokens=self.chunk_tokens, new_tokens=self.new_tokens, repeats=self.repeats,
            is_cold=self.cold,
        )  # fmt: skip


@command(app, "bench", "device", "dtype", "store", *SALT)
def run_bench(options: BenchOptions, settings: Settings) -> None:
    """Measure speed, also on random weights of any shape.

    TTFT, its parts, and decoding, of one request after another; beside the policies, full recompute and transformers'
    generate are measured.

    \b
      pic bench --shape tiny --algo full --algo cacheblend:ratio=.05,.15
    """
    with open_subject(options, settings) as subject:
        from pictool.bench.sync import bench_sync

        labels = {"full", *(labelled.label for labelled in subject.policies)}
        num_links = (len(labels) + subject.model.is_of_transformers) * (options.repeats + 1)
        with progress("linking", num_links) as step:
            result = bench_sync(subject.model, subject.policies, options.prompt, subject.directory, step)
        report = make_report(subject.model, options.prompt, result)
    if options.as_json:
        print_json(report)
    else:
        print_result(result, report)


@dataclass(frozen=True)
class Subject:
    """What is measured, and a directory for its objects that is removed afterwards."""

    model: Model
    policies: list[LabelledPolicy]
    directory: Path


@contextmanager
def open_subject(options: BenchOptions, settings: Settings) -> Iterator[Subject]:
    """Open the model and the policies that the options name, or else the usual ones.

    Raises:
        PicError: options that cannot be used, before anything long runs.
    """
    from pictool.bench.shapes import save_speculative, shape_of
    from pictool.linker.grid import parse_repeatable
    from pictool.runtime.model import require_name

    if options.shape is not None and options.model is not None:
        raise UsageError("--shape: cannot be combined with -m; use one of them")
    if options.model is not None:
        require_name(options.model)
    root, shape = open_store(settings).root, options.shape or DEFAULT_SHAPE
    with of_command_line():
        shape_of(shape)
        policies = parse_repeatable(options.algo or DEFAULT_POLICIES)
    from pictool.bench.prompts import needs_speculative, with_speculative
    from pictool.store.scratch import nearest_directory, scratch_directory

    model = open_bench_model(options, settings)
    if not options.algo:
        policies = runnable(model, policies)
    with scratch_directory(nearest_directory(root)) as directory:
        if options.model is None and needs_speculative(policies):
            policies = with_speculative(policies, save_speculative(shape, f"{directory}/speculative"))
        yield Subject(model, policies, directory)


def open_bench_model(options: BenchOptions, settings: Settings) -> Model:
    """The model that is measured."""
    quiet_libraries()
    from pictool.bench.shapes import random_model, shape_of

    if options.model is not None:
        return open_model(settings.override(model=options.model))
    name = shape_of(options.shape or DEFAULT_SHAPE).name
    note(f"creating a random {name}")
    return random_model(name, settings.device, settings.dtype, salt=settings.salt)


def make_report(model: Model, options: PromptOptions, result: SyncResult) -> dict[str, Any]:
    """What `--json` prints."""
    from pictool.runtime.machine import machine

    return {
        "bench": "sync",
        "command": command_line(),
        "machine": machine(),
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "dtype": model.dtype,
            "device": model.device,
        },
        "options": asdict(options),
        "results": result.report(),
    }


def command_line() -> str:
    """How this process was started, without salts: `pic …`, or `python -m MODULE …`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["pic"] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *without_salts(sys.argv[1:])])


def print_result(result: SyncResult, report: dict[str, Any]) -> None:
    machine, model = report["machine"], report["model"]
    on = machine["gpu"] if model["device"] != "cpu" else f"{machine['cpu']}, {machine['threads']} thread(s)"
    cold = "cold: read from their device" if report["options"]["is_cold"] else "warm: in the page cache"
    print(f"{model['name']} ({model['dtype']}) on {on}")
    print(f"prompt of {result.prompt_tokens} tokens; objects of {result.object_bytes / 1e6:.1f} MB on disk, {cold}")
    columns = ["policy", "rows", "TTFT ms", "load", "select", "compute", "speedup", "prompt\n/ rows",
               "tokens\n/ s", "MB\nread", "peak\nMB"]  # fmt: skip
    print_table(columns, [_row(method) for method in result.methods])
    print(
        "Medians of the repeats; TTFT with the least and the most. speedup: full / it, median of the repeats' ratios."
    )


def _row(method: MethodResult) -> list[str]:
    median, ttft = method.median, method.ttft
    return [
        method.label, f"{method.samples[0].rows:.0f}",
        f"{ttft.median * 1e3:,.1f} ({ttft.low * 1e3:,.1f}–{ttft.high * 1e3:,.1f})",
        *(number(median[name], 1e3) for name in ("load_s", "select_s", "recompute_s")),
        f"{method.speedup:.2f}x", f"{method.row_floor:.1f}x",
        number(median["decode_tokens_per_s"]), number(median["bytes_read"], 1e-6), number(median["peak_bytes"], 1e-6),
    ]  # fmt: skip


def number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.1f}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is to the left, the others to the right."""
    from pictool.commands.console.terminal import LabelledTable, open_screen

    table = LabelledTable(columns)
    for row in rows:
        table.add_row(*row)
    open_screen().print(table)
