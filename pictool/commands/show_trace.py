"""A trace on the terminal: what was linked, counts, times, and the prompt's text with what was computed marked."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pictool.commands.screen import (
    bars,
    harmless,
    has_color,
    heading,
    open_screen,
    short,
    table,
    visible,
)
from pictool.trace.counts import TraceView
from pictool.trace.format import Trace
from pictool.trace.heatmap import style_of

_TIMES = (("load", "load_s"), ("select", "select_s"), ("recompute", "recompute_s"), ("decode", "decode_s"))


def show_trace(path: Path, trace: Trace, view: TraceView) -> None:
    """Facts, candidates, times, and counts per chunk and layer."""
    screen = open_screen()
    for field, value in _facts(path, trace).items():
        screen.print(Text(f"{field:<12} {visible(value)}"), overflow="fold")
    heading(screen, "first token of the answer: the likeliest")
    likeliest = [(short(one.text, 16), one.probability, f"{one.probability:.4f}") for one in view.candidates[:5]]
    bars(screen, likeliest, 1.0)
    heading(screen, f"times (first token after {1e3 * trace.report['timing']['ttft_s']:.1f} ms)")
    times = [(label, float(trace.report["timing"][field])) for label, field in _TIMES]
    bars(screen, [(label, seconds, f"{1e3 * seconds:.1f} ms") for label, seconds in times])
    heading(screen, "computed tokens by part (mean of the layers)")
    screen.print(_parts(trace, view))
    heading(screen, "computed context tokens by layer")
    total = trace.layout.num_context
    bars(screen, [(f"layer {i}", float(count), f"{count} of {total}") for i, count in enumerate(view.layers)], total)


def _facts(path: Path, trace: Trace) -> dict[str, str]:
    tokens, report = trace.report["tokens"], trace.report
    return {
        "trace": str(path),
        "model": f"{report['model']} ({trace.target.model[:12]}, {trace.target.dtype}, {report['engine']})",
        "policy": trace.policy,
        "prompt": f"{tokens['prompt']} tokens: head {tokens['head']}, {len(trace.chunks)} chunks "
        f"{tokens['context'] - tokens['head']}, tail {tokens['tail']}",
        "recomputed": f"{tokens['recomputed']:.1f} of {tokens['context']} context tokens per layer",
        "answer": trace.answer,
    }


def _parts(trace: Trace, view: TraceView) -> Table:
    has_scores = trace.scores is not None
    rows = []
    for index, part in enumerate(view.parts):
        name = "head" if index == 0 else "tail" if index == len(view.parts) - 1 else str(index)
        scores = [] if not has_scores else ["", ""] if part.score is None else [f"{x:.3g}" for x in part.score]
        source = visible(part.source) if 0 < index < len(view.parts) - 1 else ""
        rows.append([name, str(part.start), str(part.num_tokens), f"{part.computed:.1f}", *scores, source])
    columns = ["part", "start", "tokens", "computed", *(["score", "most"] if has_scores else []), "source"]
    return table(columns, rows, left=(0, len(columns) - 1))


def show_text(trace: Trace, view: TraceView) -> None:
    """The prompt's text; tokens that were computed are marked by the number of layers they were computed at."""
    screen, num_layers = open_screen(), len(trace.rows)
    heading(screen, "text; marked: computed, by number of layers")
    screen.print(_legend(screen, num_layers))
    for part, name in zip(view.parts, trace.sources, strict=True):
        if part.num_tokens:
            screen.print(Text(f"-- {visible(name)} [{part.start}, {part.end})", style="dim"))
            screen.print(_marked(screen, trace, view, part.start, part.end, num_layers))
    if trace.generated:
        screen.print(Text("-- generated", style="dim"))
        screen.print(Text(harmless("".join(one.text for one in trace.generated))))


def _legend(screen: Console, num_layers: int) -> Text:
    if not has_color(screen):
        return Text(f"[computed at all {num_layers} layers]   [at 2 of them]2   reused at every layer", style="dim")
    shown = sorted({1, (1 + num_layers) // 2, num_layers})
    line = Text("")
    for depth in shown:
        line.append_text(_mark(screen, f" {depth} ", depth, num_layers)).append(" ")
    return line.append("plain: reused at every layer")


def _marked(screen: Console, trace: Trace, view: TraceView, start: int, end: int, num_layers: int) -> Text:
    text = Text("")
    for depth, group in groupby(range(start, end), key=lambda i: int(view.depth[i])):
        text.append_text(_mark(screen, harmless("".join(trace.pieces[i] for i in group)), depth, num_layers))
    return text


def _mark(screen: Console, text: str, depth: int, num_layers: int) -> Text:
    """Without colour: brackets, and behind them the number of layers if not all."""
    if not depth:
        return Text(text)
    if has_color(screen):
        return Text(text, style=style_of(depth / num_layers))
    return Text(f"[{text}]" + ("" if depth == num_layers else str(depth)))
