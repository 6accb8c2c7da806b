"""The tables that `pic bench async` and `storage` print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pictool.commands.bench_report import head_line, number, print_table, threads_of

if TYPE_CHECKING:
    from pictool.bench.asynchronous import AsyncResult, LoadPoint, UserSetResult
    from pictool.bench.storage import StorageResult
    from pictool.bench.traffic import Workload

_OPERATIONS = {"write": "write", "read_cold": "read, cold", "read_warm": "read, warm", "verify": "verify"}
_OWN = {"disk_write": "disk's write", "disk_cold": "disk's read", "copy": "memory's copy", "checksum": "BLAKE3"}


def print_async(workload: Workload, result: AsyncResult, found: dict[str, Any]) -> None:
    print(head_line(found))
    for one in result.user_sets:
        points = [point for point in result.points if point.users == len(one.user_set.users)]
        print(_set_line(one))
        columns = ["alone", "requests", "TTFT ms", "to last token ms", "tokens", "requests/s at most", "score"]
        print_table(columns, [_alone_row(label, one) for label in one.executions[0].by_label])
        columns = ["policy", "requests/s", "TTFT ms", "±", "p50", "p99", "waiting", "latency", "busy", "served/s", "±"]
        has_goodput = one.gamma is not None
        columns += ["good/s", "±"] if has_goodput else []
        print_table(columns, [_point_row(point, has_goodput) for point in points])
    print("One request at a time, first come, first served: the engine has no continuous batching. Requests alone are")
    print("measured, as medians above; the queue runs on a virtual clock. TTFT and latency include waiting.")
    print(f"Means of {len(result.points[0].runs)} runs, ±: their standard deviation. {_source(workload)}")


def _set_line(one: UserSetResult) -> str:
    count = len(one.user_set.users)
    ratio = "" if one.user_set.ccr is None else f", context cache ratio {one.user_set.ccr:.3g}"
    goodput = f"no goodput: {one.no_goodput}" if one.gamma is None else f"good answers score {one.gamma:.3f} or more"
    return f"{count} user{'s' * (count > 1)}: objects of {one.user_set.num_bytes / 1e6:,.1f} MB{ratio}; {goodput}"


def _source(workload: Workload) -> str:
    if workload.is_scored:
        return "Every question is executed once per policy."
    if any(workload.is_sampled(number) for number in range(len(workload.user_sets))):
        return f"{workload.measured} requests are executed per policy and user set; the others draw from these."
    return "Every request is executed."


def _alone_row(label: str, one: UserSetResult) -> list[str]:
    done = [execution.by_label[label] for execution in one.executions]
    scores = [each.score for each in done if each.score is not None]
    return [
        label, str(len(done)), number(statistics.median(each.ttft_s for each in done), 1e3),
        number(statistics.median(each.service_s for each in done), 1e3),
        number(statistics.fmean(each.tokens for each in done)),
        f"{1 / statistics.fmean(each.service_s for each in done):.3g}",
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


def print_storage(results: Sequence[StorageResult], found: dict[str, Any]) -> None:
    machine, size = found["machine"], results[0].size
    print(f"objects of {_geometry(size.geometry)} {size.dtype} on {machine['cpu']}, {threads_of(machine)}")
    columns = ["objects", "operation", "GB/s", "range", "against", "GB/s", "share", "expected GB/s", "share"]
    print_table(columns, [row for one in results for row in _storage_rows(one)])
    print("Medians of the rounds, GB (10^9 bytes) of K and V; shares are medians of the rounds' ratios.")
    print("expected: disk or memory, and the checksum that every write and read computes, together.")
    if any(one.is_cold is None for one in results):
        print("Whether cold reads were cold is unknown: this system does not tell what its page cache holds.")
    if any(one.is_cold is False for one in results):
        print("Cold reads were not cold: the page cache does not give up the files of this file system.")


def _storage_rows(one: StorageResult) -> list[list[str]]:
    size = f"{one.size.count} × {one.size.kv_bytes / 1e6:,.1f} MB"
    return [
        [size if name == "write" else "", label, *_rates(one.report()["operations"][name])]
        for name, label in _OPERATIONS.items()
    ]


def _rates(operation: dict[str, Any]) -> list[str]:
    low, high = operation["gb_s_range"]
    return [
        f"{operation['gb_s']:.2f}", f"{low:.2f}–{high:.2f}", _OWN[operation["own"]], f"{operation['own_gb_s']:.2f}",
        f"{operation['of_own']:.0%}", f"{operation['expected_gb_s']:.2f}", f"{operation['of_expected']:.0%}",
    ]  # fmt: skip


def _geometry(one: Any) -> str:
    return f"{one.layers} layers, {one.kv_heads} KV heads of {one.head_dim},"
