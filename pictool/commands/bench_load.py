"""`pic bench async` and `storage`: from options to a result, a file, a picture."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pictool.commands.bench import BenchOptions, Subject, check_options, model_line, publish, report, subject
from pictool.commands.bench_load_report import print_async, print_storage
from pictool.commands.common import UsageError, note, open_model, open_store
from pictool.commands.config import setting
from pictool.commands.link import parse_fields
from pictool.commands.progress import progress
from pictool.core import Geometry
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.bench.asynchronous import AsyncResult
    from pictool.bench.storage import ObjectSize
    from pictool.bench.traffic import Traffic, Workload
    from pictool.bench.users import UserCounts, UserSet
    from pictool.eval.datasets.base import Dataset

DEFAULT_SHAPE = "qwen2.5-0.5b"
ASYNC_ALGOS = ("full", "naive", "legolink-16", "cacheblend-15")
DEFAULT_MB = "1,16,128"


@dataclass(frozen=True)
class AsyncOptions:
    """The options of `pic bench async`; lists are separated by commas, None where the user said nothing."""

    rate: str = "0.5,1,2,4"
    users: str | None = None
    ccr: str | None = None
    memory: int | None = None
    duration: float = 40.0
    requests: int | None = None
    repeats: int = 5
    measured: int | None = None
    seed: int = 0
    chunks: int | None = None
    chunk_tokens: int | None = None
    tail_tokens: int | None = None
    new_tokens: int | None = None
    dataset: str | None = None
    params: Sequence[str] = ()
    gamma_share: float | None = None
    skip_long: bool = False


@dataclass(frozen=True)
class StorageOptions:
    """The options of `pic bench storage`; lists are separated by commas, None where the user said nothing."""

    mb: str | None = None
    tokens: str | None = None
    objects: int = 8
    geometry: str | None = None
    repeats: int = 5
    seed: int = 0


def run_async(common: BenchOptions, options: AsyncOptions) -> None:
    check_async(options)
    options, dataset = with_defaults(options), _dataset(options)
    traffic, wanted = _traffic(options), _wanted(options)
    if dataset is not None and common.shape is None and common.model is None:
        common = replace(common, model=setting("model", None, "PIC_MODEL") or "embedded")  # one that can answer
    with subject(common, DEFAULT_SHAPE, ASYNC_ALGOS, options.seed) as one:
        from pictool.bench.asynchronous import bench_async
        from pictool.bench.prompts import require_disk
        from pictool.bench.traffic import make_workload

        workload = make_workload(one.policies, _sets(one, options, wanted, dataset), traffic)
        require_disk(one.directory, workload.object_bytes)
        store = Store(one.directory / "objects")
        with progress("compiling", workload.num_objects) as step:
            workload.compile(one.model, store, step)
        note(f"{workload.num_executions} requests are executed, besides one of each policy to warm up")
        with progress("serving", workload.num_executions) as step:
            result = bench_async(one.model, store, workload, step)
        found = report("async", one.model, options, _async_results(workload, result))
    publish(common, found, lambda: print_async(workload, result, found))
    if common.plot:
        from pictool.bench.plot import plot_load

        prompts = dataset.name if dataset else f"{options.chunks} × {options.chunk_tokens} tokens"
        plot_load(result.points, f"{model_line(found)}; {prompts}, one request at a time", common.plot)


def check_async(options: AsyncOptions) -> None:
    """Refuse what makes no sense together."""
    if options.users is not None and options.ccr is not None:
        raise UsageError("--ccr: chooses the number of users; leave it or --users out")
    if options.dataset is None:
        given = {
            "-p": options.params or None, "--gamma-share": options.gamma_share,
            "--skip-long": options.skip_long or None,
        }  # fmt: skip
        why = "is for a --dataset"
    else:
        given = {"--chunks": options.chunks, "--tail-tokens": options.tail_tokens, "--measured": options.measured}
        why = "is for random prompts; a --dataset brings its own, each of which is executed once"
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option}: {why}")


def with_defaults(options: AsyncOptions) -> AsyncOptions:
    """What the user said nothing of; what a dataset brings stays open."""
    defaults: dict[str, Any] = {"users": None if options.ccr else "4", "gamma_share": 0.8}
    if options.dataset is None:
        defaults |= {"chunks": 8, "chunk_tokens": 512, "tail_tokens": 32, "new_tokens": 16, "measured": 20}
    return replace(options, **{name: value for name, value in defaults.items() if getattr(options, name) is None})


def numbers(option: str, text: str, kind: type[int] | type[float] = float) -> tuple[Any, ...]:
    """The numbers of a list that is separated by commas.

    Raises:
        UsageError: something in it is none.
    """
    try:
        found = tuple(kind(one) for one in text.split(","))
    except ValueError as error:
        whole = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} {text!r}: must be {whole}, separated by commas") from error
    if not all(map(math.isfinite, found)):
        raise UsageError(f"{option} {text!r}: must be finite")
    return found


def _dataset(options: AsyncOptions) -> Dataset | None:
    if options.dataset is None:
        return None
    from pictool.eval.datasets import open_dataset

    return open_dataset(options.dataset, parse_fields(options.params))


def _traffic(options: AsyncOptions) -> Traffic:
    from pictool.bench.traffic import Traffic

    share = options.gamma_share
    assert share is not None, "with_defaults"
    return Traffic(
        numbers("--rate", options.rate), options.duration, options.requests, options.repeats, options.seed,
        options.measured or 0, share,
    )  # fmt: skip


def _wanted(options: AsyncOptions) -> UserCounts:
    from pictool.bench.users import UserCounts

    counts = () if options.users is None else numbers("--users", options.users, int)
    return UserCounts(counts, () if options.ccr is None else numbers("--ccr", options.ccr), options.memory)


def _sets(one: Subject, options: AsyncOptions, wanted: UserCounts, dataset: Dataset | None) -> list[UserSet]:
    from pictool.bench.users import RandomUsers, dataset_user_sets, dataset_users, random_user_sets
    from pictool.eval.cases import SpecOptions

    if dataset is None:
        workload = RandomUsers(**{field.name: getattr(options, field.name) for field in fields(RandomUsers)})
        return random_user_sets(one.model, workload, wanted, options.seed, one.directory)
    settings = SpecOptions(chunk_tokens=options.chunk_tokens, max_new_tokens=options.new_tokens)
    users, left_out = dataset_users(one.model, dataset, settings, options.skip_long)
    if left_out:
        note(f"{left_out} cases do not fit {one.model.name}, and are left out")
    return dataset_user_sets(one.model, users, wanted, dataset.name)


def _async_results(workload: Workload, result: AsyncResult) -> dict[str, Any]:
    return {
        "policies": {
            one.label: {"algo": one.policy.name, "params": one.policy.params} for one in workload.executed_policies
        },
        "serving": "one request at a time, first come, first served, no continuous batching; virtual clock",
        "points": [point.report() for point in result.points],
        "user_sets": [one.report() for one in result.user_sets],
    }


def run_storage(common: BenchOptions, options: StorageOptions) -> None:
    check_options(common)
    sizes = storage_sizes(common, options)
    from pictool.bench.storage import bench_storage
    from pictool.controller.calibration import nearest_directory
    from pictool.runtime.machine import machine

    where = nearest_directory(open_store(common.store).root)
    with progress("measuring", len(sizes) * options.repeats) as step:
        results = bench_storage(sizes, where, options.repeats, options.seed, step)
    found = {
        "bench": "storage",
        "command": shlex.join(["pic", *sys.argv[1:]]),
        "machine": machine(),
        "options": asdict(options),
        "results": [one.report() for one in results],
    }
    publish(common, found, lambda: print_storage(results, found))


def storage_sizes(common: BenchOptions, options: StorageOptions) -> list[ObjectSize]:
    """The sizes of objects that the options ask for.

    Raises:
        PicError: options that make no sense, or name no model.
    """
    from pictool.bench.storage import ObjectSize, size_of_mb

    if options.mb is not None and options.tokens is not None:
        raise UsageError("--mb: chooses the number of tokens; leave it or --tokens out")
    geometry, dtype = storage_geometry(common, options)
    if options.tokens is not None:
        tokens = numbers("--tokens", options.tokens, int)
        return list(dict.fromkeys(ObjectSize(one, options.objects, geometry, dtype) for one in tokens))
    sizes = numbers("--mb", options.mb or DEFAULT_MB)
    return list(dict.fromkeys(size_of_mb(one, options.objects, geometry, dtype) for one in sizes))


def storage_geometry(common: BenchOptions, options: StorageOptions) -> tuple[Geometry, str]:
    """Layers, KV heads and dimensions as given, of a shape or of a model; those of Llama-3.1-8B if none is named."""
    from pictool.bench.shapes import shape_of
    from pictool.bench.storage import LLAMA_8B

    if options.geometry is not None and (common.shape is not None or common.model is not None):
        raise UsageError("--geometry: is that of --shape or -m, if they are given; leave it or them out")
    dtype = "bfloat16" if common.dtype in (None, "auto") else str(common.dtype)
    if options.geometry is not None:
        values = numbers("--geometry", options.geometry, int)
        if len(values) != 3:
            raise UsageError(f"--geometry {options.geometry}: must be LAYERS,KV_HEADS,HEAD_DIM, as 32,8,128")
        return Geometry(*values), dtype
    if common.model is not None:
        return open_model(common.model, "cpu", None).geometry, dtype
    return LLAMA_8B if common.shape is None else geometry_of(shape_of(common.shape).config), dtype


def geometry_of(config: Any) -> Geometry:
    """Of the fields of a `transformers` configuration."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Geometry(config["num_hidden_layers"], config["num_key_value_heads"], head_dim)
