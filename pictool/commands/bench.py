"""`pic bench sync`, `context` and `breakdown`: from options to a result, a file, a picture."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.bench.options import ContextOptions, PromptOptions
from pictool.commands.bench_report import print_breakdown, print_context, print_sync, threads_of
from pictool.commands.common import UsageError, note, open_model, open_store, print_json, quiet_libraries, to_json
from pictool.commands.config import setting
from pictool.commands.outputs import output_path
from pictool.commands.progress import progress
from pictool.store.store import atomic_write

if TYPE_CHECKING:
    from pictool.linker.grid import Labelled
    from pictool.runtime.model import Model

DEFAULT_SHAPE = "qwen2.5-0.5b"
DEFAULT_CONTEXT_SHAPE = "tiny"  # small enough that 32k tokens in full take seconds
SYNC_ALGOS = ("full", "naive", "legolink-16", "cacheblend-15")
CONTEXT_ALGOS = ("full", "legolink-16", "cacheblend-15", "naive")
BREAKDOWN_ALGOS = ("naive", "legolink-16", "cacheblend-15", "cacheblend-15:filter=single")


@dataclass(frozen=True)
class BenchOptions:
    """The options that every bench has; None or empty where the user said nothing."""

    shape: str | None = None
    model: str | None = None
    algo: Sequence[str] = ()
    device: str | None = None
    dtype: str | None = None
    store: str | None = None
    threads: int | None = None
    output: str | None = None
    plot: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Subject:
    """What is measured, and a directory for its objects that is removed afterwards."""

    model: Model
    policies: list[Labelled]
    directory: Path


def run_sync(common: BenchOptions, options: PromptOptions) -> None:
    from pictool.bench.sync import bench_sync

    with subject(common, DEFAULT_SHAPE, SYNC_ALGOS, options.seed) as one:
        with progress("linking", _runs(one, options.repeats, 2)) as step:
            result = bench_sync(one.model, one.policies, options, one.directory, step)
        found = report("sync", one.model, options, result.report())
    publish(common, found, lambda: print_sync(result, found))


def run_context(common: BenchOptions, options: ContextOptions) -> None:
    from pictool.bench.context import bench_context
    from pictool.bench.plot import plot_context

    with subject(common, DEFAULT_CONTEXT_SHAPE, CONTEXT_ALGOS, options.seed) as one:
        with progress("linking", _runs(one, options.repeats, 2) * len(options.lengths)) as step:
            result = bench_context(one.model, one.policies, options, one.directory, step)
        found = report("context", one.model, options, result.report())
    publish(common, found, lambda: print_context(result, found))
    if common.plot:
        title = f"{model_line(found)}, chunks of {options.chunk_tokens} tokens"
        plot_context(result, title, common.plot)


def run_breakdown(common: BenchOptions, options: PromptOptions) -> None:
    from pictool.bench.breakdown import bench_breakdown
    from pictool.bench.plot import plot_breakdown

    with subject(common, DEFAULT_SHAPE, BREAKDOWN_ALGOS, options.seed) as one:
        with progress("linking", _runs(one, options.repeats, 0)) as step:
            result = bench_breakdown(one.model, one.policies, options, one.directory, step)
        found = report("breakdown", one.model, options, result.report())
    publish(common, found, lambda: print_breakdown(result, found))
    if common.plot:
        title = f"{model_line(found)}, {options.chunks} chunks of {options.chunk_tokens} tokens"
        plot_breakdown(result, title, common.plot)


def _runs(one: Subject, repeats: int, baselines: int) -> int:
    """How many runs there will be; `full` may be among the policies already."""
    has_full = baselines and any(policy.label == "full" for policy in one.policies)
    return (len(one.policies) + baselines - bool(has_full)) * (repeats + 1)


@contextmanager
def subject(common: BenchOptions, shape: str, algos: Sequence[str], seed: int) -> Iterator[Subject]:
    """What the options name, or else a random model of `shape` under the policies `algos`.

    Raises:
        PicError: options that cannot be used, found before anything long runs.
    """
    check_options(common)
    root = open_store(common.store).root
    from pictool.bench.prompts import needs_speculative, with_speculative
    from pictool.controller.calibration import nearest_directory
    from pictool.linker.grid import parse_repeatable

    policies = parse_repeatable(common.algo or algos)
    model = open_subject(common, shape, seed)
    with tempfile.TemporaryDirectory(prefix=".pic-bench-", dir=nearest_directory(root)) as directory:
        if common.model is None and needs_speculative(policies):
            from pictool.bench.shapes import save_speculative

            policies = with_speculative(policies, save_speculative(common.shape or shape, f"{directory}/speculative"))
        yield Subject(model, policies, Path(directory))


def check_options(common: BenchOptions) -> None:
    """Refuse what makes no sense, and outputs that cannot be written."""
    if common.shape is not None and common.model is not None:
        raise UsageError("--shape: names a random model; leave it or -m out")
    if common.output is not None:
        output_path("-o", common.output, [])
    if common.plot is not None:
        from pictool.bench.plot import picture_paths, require_matplotlib

        require_matplotlib()
        for path in picture_paths(common.plot):
            output_path("--plot", str(path), [])


def open_subject(common: BenchOptions, shape: str, seed: int) -> Model:
    """The model that is measured, on as many threads as asked for."""
    quiet_libraries()
    import torch

    from pictool.bench.shapes import random_model, shape_of

    if common.threads is not None:
        torch.set_num_threads(common.threads)
    if common.model is not None:
        return open_model(common.model, common.device, common.dtype)
    name = shape_of(common.shape or shape).name
    device, dtype = setting("device", common.device, "PIC_DEVICE"), setting("dtype", common.dtype, "PIC_DTYPE")
    note(f"making a random {name}")
    return random_model(name, device or "auto", dtype or "auto", seed)


def report(bench: str, model: Model, options: Any, results: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints and `-o` writes."""
    from pictool.runtime.machine import machine

    return {
        "bench": bench,
        "command": shlex.join(["pic", *sys.argv[1:]]),
        "machine": machine(),
        "model": {"name": model.name, "dtype": model.dtype, "device": model.device},
        "options": asdict(options),
        "results": results,
    }


def model_line(found: dict[str, Any]) -> str:
    """The model and what it ran on, for a title."""
    machine, model = found["machine"], found["model"]
    where = machine["gpu"] if model["device"].startswith("cuda") else threads_of(machine)
    return f"{model['name']}, {model['dtype']}, {where}"


def publish(common: BenchOptions, found: dict[str, Any], print_tables: Callable[[], None]) -> None:
    """Write the file, then print tables or JSON."""
    if common.output is not None:
        with atomic_write(Path(common.output)) as file:
            file.write((to_json(found) + "\n").encode())
        note(f"wrote {common.output}")
    if common.as_json:
        print_json(found)
    else:
        print_tables()
