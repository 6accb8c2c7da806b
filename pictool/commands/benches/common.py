"""What all benches share: the options, the subject that is measured, the report, and how tables are printed."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import output_path, print_json, write_json
from pictool.commands.console.verbosity import note
from pictool.commands.settings.engine import runnable
from pictool.commands.settings.options import MODEL, OUTPUT, POLICY, SPECS, JsonOption, option
from pictool.commands.settings.resources import open_model, open_store, quiet_libraries
from pictool.commands.settings.salt import without_salts
from pictool.commands.settings.settings import Settings

if TYPE_CHECKING:
    from pictool.linker.grid import LabelledPolicy
    from pictool.runtime.model import Model

DEFAULT_SHAPE = "qwen2.5-0.5b"

SeedOption = Annotated[int, option("--seed", "N", "Seed of weights and documents.", min=0)]


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
    from pictool.controller.calibration import nearest_directory
    from pictool.store.scratch import scratch_directory

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


def number(value: float | None, scale: float = 1.0, decimals: int = 1) -> str:
    return "-" if value is None else f"{value * scale:,.{decimals}f}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is to the left, the others to the right."""
    from pictool.commands.console.terminal import LabelledTable, open_screen

    table = LabelledTable(columns)
    for row in rows:
        table.add_row(*row)
    open_screen().print(table)
