"""What the model shows behind a trace, on the terminal: attention, sinks, and the deviation from full recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pictool.commands.inspect_object import SHOWN_OFFSETS
from pictool.commands.screen import first_tokens, heading, heat_map, open_screen, percent_grid, short, table, visible
from pictool.trace.format import Trace
from pictool.trace.labels import part_at, row_labels

if TYPE_CHECKING:
    from pictool.trace.attention import AttentionMap
    from pictool.trace.deviation import Against

_MOST_ROWS = 24  # of an attention map
_MOST_LISTED = 10


def show_sinks(trace: Trace, seen: AttentionMap, first: int) -> None:
    """What the first tokens of the head and of each chunk draw of the tail's and the answer's attention."""
    screen = open_screen()
    drawn, even = seen.initial(first), seen.initial_if_even(first).mean(0)  # [layers, heads, rows, parts], [parts]
    heading(screen, f"% of the attention of tail and answer: {first_tokens(first)} of each part")
    mean, by_layer = drawn.mean((0, 1, 2)), drawn.mean((1, 2))
    rows = [
        [name, *(f"{100 * x:.1f}" for x in (mean[i], even[i])), str(seen.layers[int(by_layer[:, i].argmax())])]
        for i, name in enumerate(["head", *(str(i + 1) for i in range(len(trace.chunks)))])
    ]
    chunks = [f"{100 * x[1:].sum():.1f}" for x in (mean, even)]
    screen.print(table(["part", "drawn", "if even", "most at layer"], [*rows, ["chunks", *chunks, ""]]))
    names = [f"layer {layer}" for layer in seen.layers]
    heading(screen, f"% of attention: {first_tokens(first)} of all chunks, by layer and head")
    percent_grid(screen, drawn[..., 1:].sum(-1).mean(2), names, "h")
    heading(screen, "% of attention: one token of a chunk, by its place (mean of chunks, heads)")
    percent_grid(screen, seen.by_offset(SHOWN_OFFSETS), names, "t")


def show_attention(trace: Trace, seen: AttentionMap, layer: int | None, head: int | None, scale: str) -> None:
    """The map of the tail and the generated tokens over the prompt, and what draws most."""
    screen = open_screen()
    where = f"layer {'all' if layer is None else layer}, head {'all' if head is None else head}"
    shares = seen.share(layer, head)
    values = seen.scaled(layer, head) if scale == "minmax" else shares
    what = "QK scaled to 0..1 by row" if scale == "minmax" else "share of a row"
    heading(screen, f"attention of tail and answer over the prompt: {where}")
    screen.print(what, style="dim")
    labels = [visible(text) for text in row_labels(trace, seen)]
    skipped = max(0, len(values) - _MOST_ROWS)
    heat_map(screen, values[skipped:], labels[skipped:], trace.layout.starts, 1.0 if scale == "minmax" else None)
    if skipped:
        screen.print(f"the last {_MOST_ROWS} of {len(values)} rows", style="dim")
    heading(screen, "tokens that draw most (mean of all rows, %)")
    screen.print(table(["token", "at", "part", "%"], _most(trace, shares.mean(0))))


def _most(trace: Trace, values: NDArray[np.floating[Any]]) -> list[list[str]]:
    """The prompt's tokens with the highest of `values`, as rows of a table."""
    best = np.argsort(-values[: trace.layout.num_tokens], kind="stable")[:_MOST_LISTED]
    return [[short(trace.pieces[i], 16), str(i), part_at(trace, int(i)), f"{100 * values[i]:.2f}"] for i in best]


def show_against(trace: Trace, against: Against, choices: tuple[str, ...]) -> None:
    """Deviation from full recompute per layer, per token, and per generated token."""
    screen = open_screen()
    kv, attention = against.kv, against.attention
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
    screen.print(table(["token", "at", "part", "more"], _most(trace, attention.gained.mean(0))))
    screen.print(table(["token", "at", "part", "less"], _most(trace, -attention.gained.mean(0))))
    heading(screen, "by generated token: KL(full || linked), probabilities, full's choice")
    columns = ["token", "KL", "linked", "full", "full's choice", "full's p"]
    screen.print(table(columns, _generated(trace, against, choices), left=(0, 4)))


def _generated(trace: Trace, against: Against, choices: tuple[str, ...]) -> list[list[str]]:
    return [
        [short(token.text, 16), f"{one.kl:.3g}", f"{one.linked:.4f}", f"{one.full:.4f}", short(choice, 16),
         f"{one.choice_full:.4f}"]
        for token, one, choice in zip(trace.generated, against.generated, choices, strict=True)
    ]  # fmt: skip
