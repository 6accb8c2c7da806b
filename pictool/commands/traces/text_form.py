"""Print traces on the terminal: what was linked, counts, times, the marked text; and what analysing them shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pictool.commands.console import words
from pictool.commands.console.terminal import (
    bars,
    has_color,
    heading,
    open_screen,
    table,
)
from pictool.escapes import visible, visible_lines
from pictool.trace.counts import TraceCounts
from pictool.trace.format import Trace
from pictool.trace.heatmap import color_style
from pictool.trace.labels import position_label, short

if TYPE_CHECKING:
    from pictool.trace.attention import AttentionMap
    from pictool.trace.deviation import DeviationFromFull

_MAX_LISTED = 10
_TIMES = (("load", "load_s"), ("select", "select_s"), ("recompute", "recompute_s"), ("decode", "decode_s"))


def show_trace(path: Path, trace: Trace, counts: TraceCounts, sections: Sequence[str]) -> None:
    """Show the sections header, candidates, times, parts and layers, as far as they are asked for."""
    screen = open_screen()
    if "header" in sections:
        for field, value in _facts(path, trace).items():
            screen.print(Text(f"{field:<12} {visible(value)}"), overflow="fold")
    if "candidates" in sections:
        heading(screen, "first token of the answer: the likeliest")
        likeliest = [
            (short(token.text, 16), token.probability, f"{token.probability:.4f}") for token in counts.candidates[:5]
        ]
        bars(screen, likeliest, 1.0)
    if "times" in sections:
        heading(screen, f"times (first token after {1e3 * trace.report['timing']['ttft_s']:.1f} ms)")
        times = [(label, float(trace.report["timing"][field])) for label, field in _TIMES]
        bars(screen, [(label, seconds, f"{1e3 * seconds:.1f} ms") for label, seconds in times])
    if "parts" in sections:
        heading(screen, "computed tokens by part (mean of the layers)")
        screen.print(_parts(trace, counts))
    if "layers" in sections:
        heading(screen, "computed context tokens by layer")
        total = trace.layout.num_context
        by_layer = enumerate(counts.rows_per_layer)
        bars(screen, [(f"layer {i}", float(count), f"{count} of {total}") for i, count in by_layer], total)


def _facts(path: Path, trace: Trace) -> dict[str, str]:
    """What a trace is, field by field."""
    tokens, report = trace.report["tokens"], trace.report
    return {
        "trace": str(path),
        "model": f"{report['model']} ({trace.target.model[:12]}, {trace.target.dtype}, {report['engine']})",
        "policy": trace.policy,
        "prompt": f"{tokens['prompt']} tokens: head {tokens['head']}, {words.count(trace.num_documents, 'chunk')} "
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


def show_attention(trace: Trace, attention: AttentionMap, layer: int | None, head: int | None) -> None:
    """Show the tokens of the prompt that draw most of the attention of the tail and the generated tokens."""
    screen = open_screen()
    where = f"layer {'all' if layer is None else layer}, head {'all' if head is None else head}"
    shares = attention.share(layer, head)
    heading(screen, f"tokens that draw most, %: {where}")
    screen.print(table(["token", "at", "part", "%"], _highest(trace, shares.mean(0))))


def _highest(trace: Trace, values: NDArray[np.floating[Any]], scale: float = 100) -> list[list[str]]:
    """List the prompt's tokens with the highest values, as lines of a table; shares are in %."""
    positions = np.argsort(-values[: trace.layout.num_tokens], kind="stable")[:_MAX_LISTED]
    return [
        [short(trace.pieces[i], 16), str(i), position_label(trace, int(i)), f"{scale * values[i]:.2f}"]
        for i in positions
    ]


def show_deviation(trace: Trace, deviation: DeviationFromFull, choices: tuple[str, ...]) -> None:
    """Show the deviation from full recompute per layer, per token, and per generated token."""
    screen = open_screen()
    kv, attention = deviation.kv, deviation.attention
    heading(screen, "against full, by layer (KV: mean of the context's tokens)")
    context = slice(0, trace.layout.num_context)
    rows = [
        [f"layer {i}", *(f"{x:.3g}" for x in (kv.key[i, context].mean(), kv.value[i, context].mean(),
         kv.cosine[i, context].mean(), attention.layers[i]))]
        for i in range(len(kv.key))
    ]  # fmt: skip
    screen.print(table(["", "|dK|", "|dV|", "cosine", "attention"], rows))
    heading(screen, "tokens whose KV deviates most, |d(K,V)| (mean of the layers)")
    screen.print(table(["token", "at", "part", "d"], _highest(trace, kv.both.mean(0), 1)))
    heading(screen, "tokens that draw more of the tail's attention than under full, and less, %")
    screen.print(table(["token", "at", "part", "more"], _highest(trace, attention.gained.mean(0))))
    screen.print(table(["token", "at", "part", "less"], _highest(trace, -attention.gained.mean(0))))
    heading(screen, "by generated token: KL(full || linked), probabilities, full's choice")
    columns = ["token", "KL", "linked", "full", "full's choice", "full's p"]
    screen.print(table(columns, _generated(trace, deviation, choices), left=(0, 4)))


def _generated(trace: Trace, deviation: DeviationFromFull, choices: tuple[str, ...]) -> list[list[str]]:
    return [
        [short(token.text, 16), f"{of_token.kl:.3g}", f"{of_token.linked:.4f}", f"{of_token.full:.4f}",
         short(choice, 16), f"{of_token.choice_full:.4f}"]
        for token, of_token, choice in zip(trace.generated, deviation.generated, choices, strict=True)
    ]  # fmt: skip
