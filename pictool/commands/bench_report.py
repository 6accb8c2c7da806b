"""The tables that `pic bench sync`, `context` and `breakdown` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pictool.bench.breakdown import BreakdownResult, PolicyBreakdown
    from pictool.bench.context import ContextResult, Curve
    from pictool.bench.repeats import MedianRange
    from pictool.bench.roofline import Rates
    from pictool.bench.sync import MethodResult, SyncResult

_WIDTH = 200  # a narrow terminal wraps lines rather than losing columns


def print_sync(result: SyncResult, found: dict[str, Any]) -> None:
    print(head_line(found))
    cold = "cold: read from their device" if found["options"]["is_cold"] else "warm: in the page cache"
    print(f"prompt of {result.prompt_tokens} tokens; objects of {result.object_bytes / 1e6:.1f} MB on disk, {cold}")
    columns = ["policy", "rows", "TTFT ms", "load", "select", "compute", "speedup", "prompt\n/ rows", "TTFT\n/ floor",
               "tokens\n/ s", "MB\nread", "peak\nMB"]  # fmt: skip
    print_table(columns, [_sync_row(one) for one in result.methods])
    print("Medians of the rounds; TTFT with the least and the most. speedup: full / it, median of the rounds' ratios.")
    print(floor_line(result.rates))


def _sync_row(one: MethodResult) -> list[str]:
    median = one.median
    return [
        one.label, f"{one.samples[0].rows:.0f}", spread(one.ttft),
        *(number(median[name], 1e3) for name in ("load_s", "select_s", "recompute_s")),
        f"{one.speedup:.2f}x", f"{one.row_floor:.1f}x", f"{one.ttft_by_floor:.2f}",
        number(median["decode_tokens_per_s"]), number(median["bytes_read"], 1e-6), number(median["peak_bytes"], 1e-6),
    ]  # fmt: skip


def print_context(result: ContextResult, found: dict[str, Any]) -> None:
    print(head_line(found))
    lengths = [f"{tokens:,}" for tokens in result.lengths]
    print("TTFT in ms by tokens of the prompt, medians; exponents of TTFT over all lengths, over the longer half, and")
    print("of computing rows alone, with their standard errors")
    print_table(["policy", *lengths, "exponent", "longer half", "rows alone"], [_growth_row(one, len(lengths))
                for one in result.curves])  # fmt: skip
    print("TTFT / floor")
    print_table(["policy", *lengths], [_floor_row(one, len(lengths)) for one in result.curves])
    print(floor_line(result.rates))


def _growth_row(one: Curve, count: int) -> list[str]:
    growth = [str(fit or "-") for fit in (one.ttft, one.long_ttft, one.recompute)]
    return [one.label, *_cells([f"{point.ttft.median * 1e3:,.1f}" for point in one.points], count, one), *growth]


def _floor_row(one: Curve, count: int) -> list[str]:
    return [one.label, *_cells([f"{point.ttft.median / point.floor_s:.2f}" for point in one.points], count, one)]


def _cells(known: Sequence[str], count: int, one: Curve) -> list[str]:
    """What is known of a curve; behind it, why there is no more."""
    left = count - len(known)
    return [*known, *["no memory"] * left] if one.out_of_memory else [*known, *["-"] * left]


def print_breakdown(result: BreakdownResult, found: dict[str, Any]) -> None:
    print(head_line(found))
    print(f"prompt of {result.prompt_tokens} tokens; ms of each part (median) and its share of their sum")
    columns = ["policy", "TTFT ms", "load", "scoring", "select", "layer 0", "layer 1", "other layers", "logits",
               "other", "checks"]  # fmt: skip
    print_table(columns, [_breakdown_row(one) for one in result.methods])
    print("Layers are timed each for itself, with its check; checks: comparing and narrowing, of all layers together.")


def _breakdown_row(one: PolicyBreakdown) -> list[str]:
    parts = one.parts
    layers = [layer + check for layer, check in zip(parts.layers, parts.checks, strict=True)]
    seconds = [parts.load, parts.scoring, parts.select, sum(layers[:1]), sum(layers[1:2]), sum(layers[2:]),
               parts.logits, parts.other, sum(parts.checks)]  # fmt: skip
    return [one.label, spread(one.ttft), *(f"{value * 1e3:,.1f} {one.share(value):4.0%}" for value in seconds)]


def head_line(found: dict[str, Any]) -> str:
    machine, model = found["machine"], found["model"]
    where = machine["gpu"] if model["device"].startswith("cuda") else f"{machine['cpu']}, {threads_of(machine)}"
    return f"{model['name']} ({model['dtype']}) on {where}"


def threads_of(machine: dict[str, Any]) -> str:
    count: int = machine["threads"]
    return f"{count} thread" + "s" * (count != 1)


def floor_line(rates: Rates) -> str:
    return (
        f"floor: the longer of bytes read / {rates.copy_bytes_s / 1e9:.1f} GB/s (copy, measured) and FLOPs of the rows "
        f"/ {rates.flops_s / 1e12:.3g} TFLOP/s (matmul, measured)"
    )


def spread(one: MedianRange) -> str:
    """412.0 (405.1–431.2), in milliseconds."""
    return f"{one.median * 1e3:,.1f} ({one.low * 1e3:,.1f}–{one.high * 1e3:,.1f})"


def number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.1f}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is to the left, the others to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=_WIDTH, highlight=False, markup=False).print(table)
