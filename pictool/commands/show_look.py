"""Show the analysis of a trace on the terminal: attention, attention sinks, and deviation from full recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pictool.commands.inspect_object import SHOWN_OFFSETS
from pictool.commands.screen import first_tokens, heading, heat_map, open_screen, percent_grid, short, table, visible
from pictool.trace.format import Trace
from pictool.trace.labels import position_label, row_labels

if TYPE_CHECKING:
    from pictool.trace.attention import AttentionMap
    from pictool.trace.deviation import DeviationFromFull

_MAX_ROWS = 24  # of an attention map
_MAX_LISTED = 10


def show_attention_sinks(trace: Trace, attention: AttentionMap, num_initial: int) -> None:
    """Show what the initial tokens of the head and of each chunk draw of the tail's and the answer's attention."""
    screen = open_screen()
    drawn = attention.initial_share(num_initial)  # [layers, heads, rows, parts]
    uniform = attention.uniform_initial_share(num_initial).mean(0)  # [parts]
    heading(screen, f"% of the attention of tail and answer: {first_tokens(num_initial)} of each part")
    mean, by_layer = drawn.mean((0, 1, 2)), drawn.mean((1, 2))
    rows = [
        [name, *(f"{100 * x:.1f}" for x in (mean[i], uniform[i])), str(attention.layers[int(by_layer[:, i].argmax())])]
        for i, name in enumerate(["head", *(str(i + 1) for i in range(len(trace.chunks)))])
    ]
    chunks = [f"{100 * x[1:].sum():.1f}" for x in (mean, uniform)]
    screen.print(table(["part", "drawn", "if even", "most at layer"], [*rows, ["chunks", *chunks, ""]]))
    names = [f"layer {layer}" for layer in attention.layers]
    heading(screen, f"% of attention: {first_tokens(num_initial)} of all chunks, by layer and head")
    percent_grid(screen, drawn[..., 1:].sum(-1).mean(2), names, "h")
    heading(screen, "% of attention: one token of a chunk, by its place (mean of chunks, heads)")
    percent_grid(screen, attention.share_by_offset(SHOWN_OFFSETS), names, "t")


def show_attention(trace: Trace, attention: AttentionMap, layer: int | None, head: int | None, scale: str) -> None:
    """Show the attention of the tail and the generated tokens over the prompt, and the tokens that draw most."""
    screen = open_screen()
    where = f"layer {'all' if layer is None else layer}, head {'all' if head is None else head}"
    shares = attention.share(layer, head)
    values = attention.minmax(layer, head) if scale == "minmax" else shares
    what = "QK scaled to 0..1 by row" if scale == "minmax" else "share of a row"
    heading(screen, f"attention of tail and answer over the prompt: {where}")
    screen.print(what, style="dim")
    labels = [visible(text) for text in row_labels(trace, attention)]
    skipped = max(0, len(values) - _MAX_ROWS)
    heat_map(screen, values[skipped:], labels[skipped:], trace.layout.starts, 1.0 if scale == "minmax" else None)
    if skipped:
        screen.print(f"the last {_MAX_ROWS} of {len(values)} rows", style="dim")
    heading(screen, "tokens that draw most (mean of all rows, %)")
    screen.print(table(["token", "at", "part", "%"], _highest(trace, shares.mean(0))))


def _highest(trace: Trace, values: NDArray[np.floating[Any]]) -> list[list[str]]:
    """List the prompt's tokens with the highest values, as lines of a table."""
    positions = np.argsort(-values[: trace.layout.num_tokens], kind="stable")[:_MAX_LISTED]
    return [
        [short(trace.pieces[i], 16), str(i), position_label(trace, int(i)), f"{100 * values[i]:.2f}"] for i in positions
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
    names = [f"layer {i}" for i in range(len(kv.key))]
    heading(screen, "KV deviation by token, |d(K,V)|")
    heat_map(screen, kv.both, names, trace.layout.starts)
    heading(screen, "deviation of the tail's attention by token")
    heat_map(screen, attention.tokens, names, trace.layout.starts)
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
