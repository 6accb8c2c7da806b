"""`pic bench async` and `storage`: from options to a result, a file, tables, a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.bench_common import (
    DEFAULT_SHAPE,
    BenchOptions,
    SeedOption,
    Subject,
    check_options,
    command_line,
    head_line,
    make_report,
    model_line,
    number,
    open_subject,
    print_table,
    publish,
    threads_of,
)
from pictool.commands.errors import UsageError
from pictool.commands.options import ANSWER, DATASET, MODEL, PROMPT, SALT, command, make_app, option
from pictool.commands.progress import progress
from pictool.commands.request import parse_fields
from pictool.commands.resources import open_model, open_store
from pictool.commands.settings import Settings
from pictool.commands.verbosity import note
from pictool.core import Geometry

if TYPE_CHECKING:
    from pictool.bench.asynchronous import AsyncResult, LoadPoint, UserSetResult
    from pictool.bench.storage import ObjectSize, StorageResult
    from pictool.bench.traffic import Traffic, Workload
    from pictool.bench.users import UserCounts, UserSet
    from pictool.eval.datasets.base import Dataset

ASYNC_ALGOS = ("full", "naive", "legolink-16", "cacheblend-15")
DEFAULT_MB = "1,16,128"
_OPERATIONS = {"write": "write", "read_cold": "read, cold", "read_warm": "read, warm", "verify": "verify"}
_OWN = {"disk_write": "disk's write", "disk_cold": "disk's read", "copy": "memory's copy", "checksum": "BLAKE3"}


app = make_app()


@dataclass(frozen=True)
class AsyncOptions:
    """The options of `pic bench async`; lists are separated by commas, None where the user said nothing."""

    rate: Annotated[str, option("--rate", "LIST", "Requests a second, over all users.")] = "0.5,1,2,4"
    users: Annotated[Optional[str], option("--users", "LIST", "Users with documents of their own (4).")] = None
    ccr: Annotated[Optional[str], option("--ccr", "LIST", "Context cache ratios, instead of users.")] = None
    memory: Annotated[
        Optional[int], option("--memory", "N", "Bytes that the ratio is of (the device's memory).", min=1)
    ] = None
    duration: Annotated[float, option("--duration", "SECONDS", "How long requests arrive.")] = 40.0
    requests: Annotated[Optional[int], option("--requests", "N", "N requests, however long they take.", min=1)] = None
    repeats: Annotated[int, option("--repeats", "N", "Draws of arrivals.", min=1)] = 5
    measured: Annotated[
        Optional[int], option("--measured", "N", "Requests executed per policy (20); 0: all.", min=0)
    ] = None
    seed: SeedOption = 0
    chunks: Annotated[Optional[int], option("--chunks", "N", "Chunks of a prompt (8).", PROMPT, min=1)] = None
    chunk_tokens: Annotated[Optional[int], option("--chunk-tokens", "N", "Tokens of a chunk (512).", PROMPT, min=1)] = (
        None
    )
    tail_tokens: Annotated[
        Optional[int], option("--tail-tokens", "N", "Tokens after the documents (32).", PROMPT, min=1)
    ] = None
    new_tokens: Annotated[
        Optional[int], option("--new-tokens", "N", "Tokens that are decoded (16).", ANSWER, min=1)
    ] = None
    dataset: Annotated[Optional[str], option("--dataset", "NAME", "Real questions: adds goodput.", DATASET)] = None
    params: Annotated[list[str], option("-p", "FIELD=VALUE", "Any field of the dataset; repeatable.", DATASET)] = field(
        default_factory=list
    )
    gamma_share: Annotated[
        Optional[float],
        option("--gamma-share", "SHARE", "Good: at least this share of full's mean score (0.8).", DATASET),
    ] = None
    skip_long: Annotated[bool, option("--skip-long", None, "Leave out what does not fit the model.", DATASET)] = False


@dataclass(frozen=True)
class StorageOptions:
    """The options of `pic bench storage`; lists are separated by commas, None where the user said nothing."""

    mb: Annotated[Optional[str], option("--mb", "LIST", "Sizes of objects in MB (1,16,128).")] = None
    tokens: Annotated[Optional[str], option("--tokens", "LIST", "Sizes in tokens of the model.")] = None
    objects: Annotated[int, option("--objects", "N", "Objects of each size.", min=1)] = 8
    geometry: Annotated[
        Optional[str], option("--geometry", "LAYERS,KV_HEADS,HEAD_DIM", "Instead of a model's.", MODEL)
    ] = None
    repeats: Annotated[int, option("--repeats", "N", "Times that each operation is run.", min=1)] = 5
    seed: Annotated[int, option("--seed", "N", "Seed of what objects hold.", min=0)] = 0


@command(app, "async", "device", "dtype", "store", *SALT)
def run_async(options: AsyncOptions, common: BenchOptions, settings: Settings) -> None:
    """Measure TTFT, throughput and goodput under load.

    Requests of several users arrive as a Poisson process (EPIC, fig. 8).

    \b
      pic bench async --rate 1,2,4 --users 8 --algo legolink-16
      pic bench async --dataset world -m embedded
    """
    check_async(options)
    options, dataset = with_defaults(options), open_async_dataset(options)
    traffic, counts = make_traffic(options), make_counts(options)
    if dataset is not None and common.shape is None and common.model is None:
        common = replace(common, model=settings.model or "embedded")  # one that can answer
    with open_subject(common, settings, DEFAULT_SHAPE, ASYNC_ALGOS, options.seed) as subject:
        from pictool.bench.asynchronous import bench_async
        from pictool.bench.prompts import require_disk
        from pictool.bench.traffic import make_workload
        from pictool.store.store import Store

        workload = make_workload(subject.policies, make_user_sets(subject, options, counts, dataset), traffic)
        require_disk(subject.directory, workload.object_bytes)
        store = Store(subject.directory / "objects")
        with progress("compiling", workload.num_objects) as step:
            workload.compile(subject.model, store, step)
        note(f"{workload.num_executions} requests are executed, besides one of each policy to warm up")
        with progress("serving", workload.num_executions) as step:
            result = bench_async(subject.model, store, workload, step)
        report = make_report("async", subject.model, options, _async_results(workload, result))
    publish(common, report, lambda: print_async(workload, result, report))
    if common.plot:
        from pictool.bench.plot import plot_load

        prompts = dataset.name if dataset else f"{options.chunks} × {options.chunk_tokens} tokens"
        plot_load(result.points, f"{model_line(report)}; {prompts}, one request at a time", common.plot)


def check_async(options: AsyncOptions) -> None:
    """Refuse what makes no sense together."""
    if options.users is not None and options.ccr is not None:
        raise UsageError("--ccr: chooses the number of users; leave it or --users out")
    if options.dataset is None:
        used = {
            "-p": options.params or None, "--gamma-share": options.gamma_share,
            "--skip-long": options.skip_long or None,
        }  # fmt: skip
        why = "is for a --dataset"
    else:
        used = {"--chunks": options.chunks, "--tail-tokens": options.tail_tokens, "--measured": options.measured}
        why = "is for random prompts; a --dataset brings its own, each of which is executed once"
    for name, value in used.items():
        if value is not None:
            raise UsageError(f"{name}: {why}")


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
        values = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        whole = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} {text!r}: must be {whole}, separated by commas") from error
    if not all(map(math.isfinite, values)):
        raise UsageError(f"{option} {text!r}: must be finite")
    return values


def open_async_dataset(options: AsyncOptions) -> Dataset | None:
    if options.dataset is None:
        return None
    from pictool.eval.datasets import open_dataset

    return open_dataset(options.dataset, parse_fields(options.params))


def make_traffic(options: AsyncOptions) -> Traffic:
    from pictool.bench.traffic import Traffic

    share = options.gamma_share
    assert share is not None, "with_defaults"
    return Traffic(
        rates=numbers("--rate", options.rate), duration=options.duration, requests=options.requests,
        repeats=options.repeats, seed=options.seed, measured=options.measured or 0, gamma_share=share,
    )  # fmt: skip


def make_counts(options: AsyncOptions) -> UserCounts:
    from pictool.bench.users import UserCounts

    counts = () if options.users is None else numbers("--users", options.users, int)
    return UserCounts(counts, () if options.ccr is None else numbers("--ccr", options.ccr), options.memory)


def make_user_sets(
    subject: Subject, options: AsyncOptions, counts: UserCounts, dataset: Dataset | None
) -> list[UserSet]:
    from pictool.bench.users import RandomUsers, dataset_user_sets, dataset_users, random_user_sets
    from pictool.eval.cases import SpecOptions

    if dataset is None:
        random_users = RandomUsers(**{field.name: getattr(options, field.name) for field in fields(RandomUsers)})
        return random_user_sets(subject.model, random_users, counts, options.seed, subject.directory)
    spec = SpecOptions(chunk_tokens=options.chunk_tokens, max_new_tokens=options.new_tokens)
    users, left_out = dataset_users(subject.model, dataset, spec, options.skip_long)
    if left_out:
        note(f"{left_out} cases do not fit {subject.model.name}, and are left out")
    return dataset_user_sets(subject.model, users, counts, dataset.name)


def _async_results(workload: Workload, result: AsyncResult) -> dict[str, Any]:
    return {
        "policies": {
            labelled.label: {"algo": labelled.policy.name, "params": labelled.policy.params}
            for labelled in workload.executed_policies
        },
        "serving": "one request at a time, first come, first served, no continuous batching; virtual clock",
        "points": [point.report() for point in result.points],
        "user_sets": [users.report() for users in result.user_sets],
    }


# Storage


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
        raise UsageError("--mb: chooses the number of tokens; leave it or --tokens out")
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

    if options.geometry is not None and (common.shape is not None or common.model is not None):
        raise UsageError("--geometry: is that of --shape or -m, if they are given; leave it or them out")
    dtype = settings.option("dtype") or "auto"
    dtype = "bfloat16" if dtype == "auto" else dtype
    if options.geometry is not None:
        values = numbers("--geometry", options.geometry, int)
        if len(values) != 3:
            raise UsageError(f"--geometry {options.geometry}: must be LAYERS,KV_HEADS,HEAD_DIM, as 32,8,128")
        return Geometry(*values), dtype
    if common.model is not None:
        return open_model(settings.override(model=common.model, device="cpu")).geometry, dtype
    return LLAMA_8B if common.shape is None else geometry_of(shape_of(common.shape).config), dtype


def geometry_of(config: Any) -> Geometry:
    """Of the fields of a `transformers` configuration."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Geometry(config["num_hidden_layers"], config["num_key_value_heads"], head_dim)


# Tables


def print_async(workload: Workload, result: AsyncResult, report: dict[str, Any]) -> None:
    print(head_line(report))
    for users in result.user_sets:
        points = [point for point in result.points if point.users == len(users.user_set.users)]
        print(_set_line(users))
        columns = ["alone", "requests", "TTFT ms", "to last token ms", "tokens", "requests/s at most", "score"]
        print_table(columns, [_alone_row(label, users) for label in users.executions[0].by_label])
        columns = ["policy", "requests/s", "TTFT ms", "±", "p50", "p99", "waiting", "latency", "busy", "served/s", "±"]
        has_goodput = users.gamma is not None
        columns += ["good/s", "±"] if has_goodput else []
        print_table(columns, [_point_row(point, has_goodput) for point in points])
    print("One request at a time, first come, first served: the engine has no continuous batching. Requests alone are")
    print("measured, as medians above; the queue runs on a virtual clock. TTFT and latency include waiting.")
    print(f"Means of {len(result.points[0].runs)} runs, ±: their standard deviation. {_source(workload)}")


def _set_line(users: UserSetResult) -> str:
    user_set, gamma = users.user_set, users.gamma
    count = len(user_set.users)
    ratio = "" if user_set.ccr is None else f", context cache ratio {user_set.ccr:.3g}"
    goodput = f"no goodput: {users.no_goodput}" if gamma is None else f"good answers score {gamma:.3f} or more"
    return f"{count} user{'s' * (count > 1)}: objects of {user_set.num_bytes / 1e6:,.1f} MB{ratio}; {goodput}"


def _source(workload: Workload) -> str:
    if workload.is_scored:
        return "Every question is executed once per policy."
    if any(workload.is_sampled(index) for index in range(len(workload.user_sets))):
        return f"{workload.measured} requests are executed per policy and user set; the others draw from these."
    return "Every request is executed."


def _alone_row(label: str, users: UserSetResult) -> list[str]:
    done = [execution.by_label[label] for execution in users.executions]
    scores = [answer.score for answer in done if answer.score is not None]
    return [
        label, str(len(done)), number(statistics.median(answer.ttft_s for answer in done), 1e3),
        number(statistics.median(answer.service_s for answer in done), 1e3),
        number(statistics.fmean(answer.tokens for answer in done)),
        f"{1 / statistics.fmean(answer.service_s for answer in done):.3g}",
        f"{statistics.fmean(scores):.3f}" if scores else "-",
    ]  # fmt: skip


def _point_row(point: LoadPoint, has_goodput: bool) -> list[str]:
    def both(name: str, scale: float = 1.0, digits: int = 2) -> list[str]:
        values = (point.mean(name), point.deviation(name))
        return ["-" if value is None else f"{value * scale:,.{digits}f}" for value in values]

    times = ("ttft_p50_s", "ttft_p99_s", "waiting_mean_s", "latency_mean_s")
    return [
        point.label, f"{point.rate:g}", *both("ttft_mean_s", 1e3, 1),
        *(number(point.mean(name), 1e3) for name in times), f"{point.mean('utilisation'):.0%}",
        *both("throughput"), *(both("goodput") if has_goodput else ()),
    ]  # fmt: skip


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
    return f"{geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim},"
