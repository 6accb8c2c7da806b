"""`pic bench storage`: from options to a result, a file, tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.benches.common import (
    BenchOptions,
    check_options,
    command_line,
    numbers,
    print_table,
    publish,
    threads_of,
)
from pictool.commands.console.errors import UsageError
from pictool.commands.console.progress import progress
from pictool.commands.settings.options import MODEL, command, make_app, option
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.core import Geometry

if TYPE_CHECKING:
    from pictool.bench.storage import ObjectSize, StorageResult

DEFAULT_MB = "1,16,128"
_OPERATIONS = {"write": "write", "read_cold": "read, cold", "read_warm": "read, warm", "verify": "verify"}
_OWN = {"disk_write": "disk's write", "disk_cold": "disk's read", "copy": "memory's copy", "checksum": "BLAKE3"}


app = make_app()


@dataclass(frozen=True)
class StorageOptions:
    """The options of `pic bench storage`; lists are separated by commas, None where the user said nothing."""

    mb: Annotated[Optional[str], option("--mb", "LIST", "Sizes of objects in MB (1,16,128).")] = None
    tokens: Annotated[Optional[str], option("--tokens", "LIST", "Sizes of objects in tokens.")] = None
    objects: Annotated[int, option("--objects", "N", "Objects of each size.", min=1)] = 8
    geometry: Annotated[
        Optional[str], option("--geometry", "LAYERS,KV_HEADS,HEAD_DIM", "Geometry of the objects (the model's).", MODEL)
    ] = None
    repeats: Annotated[int, option("--repeats", "N", "Repeats of each operation.", min=1)] = 5
    seed: Annotated[int, option("--seed", "N", "Seed of the objects' content.", min=0)] = 0


@command(app, "storage", "dtype", "store", without=["algo", "threads", "plot"])
def run_storage(options: StorageOptions, common: BenchOptions, settings: Settings) -> None:
    """Measure writing, reading and verifying objects. Beside them: the disk's and the memory's own rates.

    \b
      pic bench storage --shape llama-3.1-8b --tokens 512,4096
    """
    check_options(common)
    sizes = storage_sizes(options, common, settings)
    from pictool.bench.storage import bench_storage
    from pictool.controller.calibration import nearest_directory
    from pictool.runtime.machine import machine

    where = nearest_directory(open_store(settings).root)
    with progress("measuring", len(sizes) * options.repeats) as step:
        results = bench_storage(sizes, where, options.repeats, options.seed, step)
    report = {
        "bench": "storage",
        "command": command_line(),
        "machine": machine(),
        "options": asdict(options),
        "results": [result.report() for result in results],
    }
    publish(common, report, lambda: print_storage(results, report))


def storage_sizes(options: StorageOptions, common: BenchOptions, settings: Settings) -> list[ObjectSize]:
    """The sizes of objects that the options ask for.

    Raises:
        PicError: options that make no sense, or name no model.
    """
    from pictool.bench.storage import ObjectSize, size_of_mb

    if options.mb is not None and options.tokens is not None:
        raise UsageError("--mb: cannot be combined with --tokens; leave one of them out")
    geometry, dtype = storage_geometry(options, common, settings)
    if options.tokens is not None:
        tokens = numbers("--tokens", options.tokens, int)
        return list(dict.fromkeys(ObjectSize(count, options.objects, geometry, dtype) for count in tokens))
    sizes = numbers("--mb", options.mb or DEFAULT_MB)
    return list(dict.fromkeys(size_of_mb(mb, options.objects, geometry, dtype) for mb in sizes))


def storage_geometry(options: StorageOptions, common: BenchOptions, settings: Settings) -> tuple[Geometry, str]:
    """Layers, KV heads and dimensions as given, of a shape or of a model; those of Llama-3.1-8B if none is named."""
    from pictool.bench.shapes import shape_of
    from pictool.bench.storage import LLAMA_8B
    from pictool.runtime.architectures import geometry_of

    if options.geometry is not None and (common.shape is not None or common.model is not None):
        raise UsageError("--geometry: cannot be combined with --shape or -m; leave one of them out")
    dtype = settings.option("dtype") or "auto"
    dtype = "bfloat16" if dtype == "auto" else dtype
    if options.geometry is not None:
        values = numbers("--geometry", options.geometry, int)
        if len(values) != 3:
            raise UsageError(f"--geometry {options.geometry}: must be LAYERS,KV_HEADS,HEAD_DIM, as 32,8,128")
        return Geometry(*values), dtype
    if common.model is not None:
        return open_model(settings.override(model=common.model, device="cpu")).geometry, dtype
    return LLAMA_8B if common.shape is None else geometry_of(shape_of(common.shape).make_config()), dtype


# Tables


def print_storage(results: Sequence[StorageResult], report: dict[str, Any]) -> None:
    machine, size = report["machine"], results[0].size
    print(f"objects of {_geometry(size.geometry)} {size.dtype} on {machine['cpu']}, {threads_of(machine)}")
    columns = ["objects", "operation", "GB/s", "range", "against", "GB/s", "share", "expected GB/s", "share"]
    print_table(columns, [row for result in results for row in _storage_rows(result)])
    print("Medians of the repeats, GB (10^9 bytes) of K and V; shares are medians of the repeats' ratios.")
    print("expected: disk or memory, and the checksum that every write and read computes, together.")
    if any(result.is_cold is None for result in results):
        print("Whether cold reads were cold is unknown: this system does not tell what its page cache holds.")
    if any(result.is_cold is False for result in results):
        print("Cold reads were not cold: the page cache does not give up the files of this file system.")


def _storage_rows(result: StorageResult) -> list[list[str]]:
    size = f"{result.size.count} × {result.size.kv_bytes / 1e6:,.1f} MB"
    return [
        [size if name == "write" else "", label, *_rates(result.report()["operations"][name])]
        for name, label in _OPERATIONS.items()
    ]


def _rates(operation: dict[str, Any]) -> list[str]:
    low, high = operation["gb_s_range"]
    return [
        f"{operation['gb_s']:.2f}", f"{low:.2f}–{high:.2f}", _OWN[operation["own"]], f"{operation['own_gb_s']:.2f}",
        f"{operation['of_own']:.0%}", f"{operation['expected_gb_s']:.2f}", f"{operation['of_expected']:.0%}",
    ]  # fmt: skip


def _geometry(geometry: Geometry) -> str:
    if geometry.others:
        return f"{geometry.layers} layers of {' and '.join(map(str, geometry.others))},"
    return f"{geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim},"
