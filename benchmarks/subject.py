"""What a measurement of `benchmarks.span_queries` is made on, and how its results are published: files and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.bench import AlgosOption, ModelOption, ShapeOption, command_line
from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import output_path, print_json, write_json
from pictool.commands.console.verbosity import note
from pictool.commands.settings.engine import runnable
from pictool.commands.settings.options import (
    MODEL,
    OUTPUT,
    JsonOption,
    option,
)
from pictool.commands.settings.resources import open_model, open_store, quiet_libraries
from pictool.commands.settings.settings import Settings

if TYPE_CHECKING:
    from pictool.linker.grid import LabelledPolicy
    from pictool.runtime.model import Model

SeedOption = Annotated[int, option("--seed", "N", "Seed of weights and documents.", min=0)]


@dataclass(frozen=True)
class BenchOptions:
    """The options that every bench has; None or empty where the user said nothing."""

    shape: ShapeOption = None
    model: ModelOption = None
    threads: Annotated[Optional[int], option("--threads", "N", "CPU threads.", MODEL, min=1)] = None
    algo: AlgosOption = field(default_factory=list)
    output: Annotated[
        Optional[str],
        option("-o, --output", "FILE", "Write all measurements, with command and machine (JSON).", OUTPUT),
    ] = None
    plot: Annotated[Optional[str], option("--plot", "FILE", "Plot the result (.svg and .png).", OUTPUT)] = None
    as_json: JsonOption = False


@dataclass(frozen=True)
class Subject:
    """What is measured, and a directory for its objects that is removed afterwards."""

    model: Model
    policies: list[LabelledPolicy]
    directory: Path


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
        raise UsageError("--shape: cannot be combined with -m; use one of them")
    if common.shape is not None:
        from pictool.bench.shapes import shape_of

        with of_command_line():
            shape_of(common.shape)
    if common.output is not None:
        output_path("-o", common.output, [])
    if common.plot is not None:
        from benchmarks.pictures import picture_paths

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
    note(f"creating a random {name}")
    return random_model(name, settings.device, settings.dtype, seed, settings.salt)


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


def publish(common: BenchOptions, report: dict[str, Any], print_tables: Callable[[], None]) -> None:
    """Write the file, then print tables or JSON."""
    if common.output is not None:
        write_json(common.output, report)
        note(f"wrote {common.output}")
    if common.as_json:
        print_json(report)
    else:
        print_tables()


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
