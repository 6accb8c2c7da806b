"""Show a trace on the terminal: what was linked, counts, times, and the text with the computed tokens marked."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pictool.commands.screen import bars, has_color, heading, open_screen, short, table, visible, visible_lines
from pictool.trace.counts import TraceCounts
from pictool.trace.format import Trace
from pictool.trace.heatmap import color_style

_TIMES = (("load", "load_s"), ("select", "select_s"), ("recompute", "recompute_s"), ("decode", "decode_s"))


def show_trace(path: Path, trace: Trace, counts: TraceCounts) -> None:
    """Show facts, candidates, times, and counts per part and layer."""
    screen = open_screen()
    for field, value in _facts(path, trace).items():
        screen.print(Text(f"{field:<12} {visible(value)}"), overflow="fold")
    heading(screen, "first token of the answer: the likeliest")
    likeliest = [
        (short(token.text, 16), token.probability, f"{token.probability:.4f}") for token in counts.candidates[:5]
    ]
    bars(screen, likeliest, 1.0)
    heading(screen, f"times (first token after {1e3 * trace.report['timing']['ttft_s']:.1f} ms)")
    times = [(label, float(trace.report["timing"][field])) for label, field in _TIMES]
    bars(screen, [(label, seconds, f"{1e3 * seconds:.1f} ms") for label, seconds in times])
    heading(screen, "computed tokens by part (mean of the layers)")
    screen.print(_parts(trace, counts))
    heading(screen, "computed context tokens by layer")
    total = trace.layout.num_context
    by_layer = enumerate(counts.rows_per_layer)
    bars(screen, [(f"layer {i}", float(count), f"{count} of {total}") for i, count in by_layer], total)


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


def _parts(trace: Trace, counts: TraceCounts) -> Table:
    has_scores = trace.scores is not None
    rows = []
    for index, part in enumerate(counts.parts):
        name = "head" if index == 0 else "tail" if index == len(counts.parts) - 1 else str(index)
        scores = [] if not has_scores else ["", ""] if part.score is None else [f"{x:.3g}" for x in part.score]
        source = visible(part.source) if 0 < index < len(counts.parts) - 1 else ""
        rows.append([name, str(part.start), str(part.num_tokens), f"{part.computed:.1f}", *scores, source])
    columns = ["part", "start", "tokens", "computed", *(["score", "most"] if has_scores else []), "source"]
    return table(columns, rows, left=(0, len(columns) - 1))


def show_text(trace: Trace, counts: TraceCounts) -> None:
    """Show the prompt's text; computed tokens are marked by the number of layers that computed them."""
    screen, num_layers = open_screen(), len(trace.rows)
    heading(screen, "text; marked: computed, by number of layers")
    screen.print(_legend(screen, num_layers))
    for part, name in zip(counts.parts, trace.sources, strict=True):
        if part.num_tokens:
            screen.print(Text(f"-- {visible(name)} [{part.start}, {part.end})", style="dim"))
            screen.print(_marked(screen, trace, counts, part.start, part.end, num_layers))
    if trace.generated:
        screen.print(Text("-- generated", style="dim"))
        screen.print(Text(visible_lines("".join(token.text for token in trace.generated))))


def _legend(screen: Console, num_layers: int) -> Text:
    if not has_color(screen):
        return Text(f"[computed at all {num_layers} layers]   [at 2 of them]2   reused at every layer", style="dim")
    line = Text("")
    for count in sorted({1, (1 + num_layers) // 2, num_layers}):
        line.append_text(_mark(screen, f" {count} ", count, num_layers)).append(" ")
    return line.append("plain: reused at every layer")


def _marked(screen: Console, trace: Trace, counts: TraceCounts, start: int, end: int, num_layers: int) -> Text:
    text = Text("")
    for count, group in groupby(range(start, end), key=lambda i: int(counts.layers_per_token[i])):
        text.append_text(_mark(screen, visible_lines("".join(trace.pieces[i] for i in group)), count, num_layers))
    return text


def _mark(screen: Console, text: str, count: int, num_layers: int) -> Text:
    """Colour a text by a number of layers; without colour put it in brackets, and the number after them if not all."""
    if not count:
        return Text(text)
    if has_color(screen):
        return Text(text, style=color_style(count / num_layers))
    return Text(f"[{text}]" + ("" if count == num_layers else str(count)))
