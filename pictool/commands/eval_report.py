"""What `pic eval` prints: quality, cost, and scores by kind, as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from pictool.eval.statistics import Estimate
    from pictool.eval.summary import Line, Summary

NONE = "-"
LEGEND = (
    "KL, same: first token and all tokens against full. Times: medians, ms.\n"
    "peak: rise of memory over what the process keeps, MB. read: KV of objects a question, MB."
)


def print_summary(summary: Summary) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    model = summary.header["model"]
    console.print(
        f"{summary.title}: {count(summary.questions, 'question')} over {count(summary.units, 'set')} of documents, "
        f"{summary.tokens:.0f} tokens a prompt; {model['name']}, {model['dtype']} on {model['device']}, "
        f"{count(summary.header['threads'], 'thread')}",
        soft_wrap=True,
    )
    tables = [quality_table(summary), cost_table(summary), *([kinds_table(summary)] if summary.kinds else [])]
    for table in tables:
        console.print()
        console.print(table)
    console.print(f"\n{LEGEND}")


def quality_table(summary: Summary) -> Table:
    """Scores with 95 % intervals, the difference to full, and fidelity to it."""
    table = make_table([summary.metric, "95 %", "vs full", "95 %", "lost", "won", "KL", "same"])
    for line in summary.lines:
        is_full = line is summary.lines[0]
        table.add_row(
            line.label, f"{line.score.mean:.3f}", interval(line.score, "{:.2f}"),
            *([NONE] * 4 if is_full else _against_full(line)),
            NONE if line.kl is None else number(line.kl.mean), percent(line.agreement),
        )  # fmt: skip
    return table


def _against_full(line: Line) -> list[str]:
    difference = f"{line.difference.mean:+.3f}"
    return [difference, interval(line.difference, "{:+.2f}"), percent(line.lost), percent(line.won)]


def cost_table(summary: Summary) -> Table:
    """Rows, times and bytes; times are medians."""
    table = make_table(["rows", "TTFT", "speedup", "load", "select", "compute", "tok/s", "peak", "read"])
    for line in summary.lines:
        timing = line.timing
        table.add_row(
            line.label, percent(line.row_share), ms(timing.ttft_s), f"{line.speedup:.2f}x", ms(timing.load_s),
            ms(timing.select_s), ms(timing.recompute_s),
            NONE if line.decode_tokens_per_s is None else f"{line.decode_tokens_per_s:.0f}",
            size(line.peak_bytes), size(line.bytes_read),
        )  # fmt: skip
    return table


def kinds_table(summary: Summary) -> Table:
    """Scores by kind of question."""
    table = make_table([f"{kind or 'other'} ({asked})" for kind, asked in summary.kinds.items()])
    for line in summary.lines:
        table.add_row(line.label, *(with_interval(line.by_kind[kind]) for kind in summary.kinds))
    return table


def make_table(columns: Sequence[str]) -> Table:
    """A table without frames, algorithms to the left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("algorithm", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def interval(estimate: Estimate, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return NONE
    return f"{form.format(estimate.low)}…{form.format(estimate.high)}"


def with_interval(estimate: Estimate) -> str:
    if estimate.low is None:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} {interval(estimate, '{:.2f}')}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def number(value: float) -> str:
    """Three digits; small ones as a power of ten."""
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share in (0, 1) or share >= 0.1 else f"{share:.1%}"


def ms(seconds: float) -> str:
    """Milliseconds, to three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def size(num_bytes: float | None) -> str:
    """Megabytes."""
    if num_bytes is None:
        return NONE
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f}"
