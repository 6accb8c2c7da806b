"""What the trace view says in words: facts, the legend, and the token under the cursor. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from pictool.trace.counts import TraceView
from pictool.trace.format import Trace
from pictool.trace.labels import part_at, short, visible
from pictool.tui.shades import STEPS, Choice, Shade, sinks_of
from pictool.tui.widgets.inks import token_style

if TYPE_CHECKING:
    from pictool.trace.analysis import Look

FIRST = 4  # tokens of a chunk that may be sinks, as of `pic inspect --sinks`


def facts(trace: Trace, name: str) -> Text:
    """Two lines: the policy and its counts, the answer."""
    tokens = trace.report["tokens"]
    counts = f"{tokens['recomputed']:.1f} of {tokens['context']} context tokens per layer"
    first = Text.assemble((visible(trace.policy), "bold"), f"  {counts}  ", (visible(name), "dim"))
    return Text("\n").join([first, Text.assemble(("answer ", "dim"), visible(trace.answer))])


def legend(shade: Shade, has_color: bool) -> Text:
    """What the colours mean, in numbers."""
    line = Text(f"{shade.least:.3g} ", style="dim")
    for step in range(1, STEPS + 1):
        line.append("  " if has_color else str(step), style=token_style(step, has_color))
    return line.append(f" {shade.most:.3g}  {shade.unit}", style="dim")


def token_line(trace: Trace, look: Look | None, shade: Shade, token: int) -> Text:
    """Everything that is known of one token."""
    num_prompt = trace.layout.num_tokens
    if token >= num_prompt:
        return _generated(trace, look, shade, token - num_prompt)
    depth, num_layers = int(trace.rows[:, token].sum()), len(trace.rows)
    words = [f"id {trace.layout.tokens[token]}", f"position {token}", f"computed at {depth} of {num_layers} layers"]
    if trace.scores is not None:
        words.append(f"score {trace.scores[token]:.4g}")
    if look is not None and look.against is not None:
        kv, gained = look.against.kv.both[:, token], look.against.attention.gained[:, token]
        words.append(f"|d(K,V)| {kv.mean():.3g}, attention {100 * gained.mean():+.2f} % against full")
    return _line(part_at(trace, token), trace.pieces[token], [*words, *_value(shade, token)])


def _generated(trace: Trace, look: Look | None, shade: Shade, index: int) -> Text:
    one = trace.generated[index]
    words = [f"id {one.id}", f"logprob {one.logprob:.3g}"]
    if look is not None and look.against is not None:
        against = look.against.generated[index]
        words.append(f"KL {against.kl:.3g}, p {against.linked:.4f}, under full {against.full:.4f}")
        words.append(f"full's choice {short(look.choices[index], 16)!r} {against.choice_full:.4f}")
    return _line(f"answer+{index}", one.text, [*words, *_value(shade, trace.layout.num_tokens + index)])


def _value(shade: Shade, token: int) -> list[str]:
    value = shade.values[token]
    is_said = "computed" in shade.unit  # by the count of layers
    return [] if is_said or np.isnan(value) else [f"{shade.unit}: {value:.4g}"]


def _line(where: str, piece: str, words: list[str]) -> Text:
    return Text.assemble((where, "bold"), " ", (f"«{short(piece, 24)}»", "bold"), "  ", ", ".join(words))


PART_COLUMNS = ("part", "start", "tokens", "computed", "score", "drawn %", "if even", "source")


def part_rows(trace: Trace, view: TraceView, look: Look | None, choice: Choice) -> list[tuple[str, ...]]:
    """Counts of every part; with the model, what its first tokens draw of the chosen layer, head and row."""
    sinks = [("", "")] * len(view.parts)
    if look is not None and look.attention is not None and choice.mode in ("attention", "minmax"):
        drawn, even = sinks_of(look.attention, choice, FIRST)
        sinks[:-1] = [(f"{100 * a:.1f}", f"{100 * b:.1f}") for a, b in zip(drawn, even, strict=True)]
    rows: list[tuple[str, ...]] = []
    for index, (part, sink) in enumerate(zip(view.parts, sinks, strict=True)):
        name = "head" if index == 0 else "tail" if index == len(view.parts) - 1 else str(index)
        count = part.computed if choice.layer is None else float(part.per_layer[choice.layer])
        score = "" if part.score is None else f"{part.score[0]:.3g}"
        rows.append((name, str(part.start), str(part.num_tokens), f"{count:.1f}", score, *sink, visible(part.source)))
    return rows


def layer_rows(trace: Trace, view: TraceView, look: Look | None) -> list[tuple[str, ...]]:
    """Computed context tokens of every layer; with the model, its deviation from full."""
    rows: list[tuple[str, ...]] = []
    context = slice(0, trace.layout.num_context)
    for layer, count in enumerate(view.layers):
        found = ["", ""]
        if look is not None and look.against is not None:
            kv = look.against.kv.both[layer, context]
            found = [f"{kv.mean():.3g}" if kv.size else "", f"{look.against.attention.layers[layer]:.3g}"]
        share = count / trace.layout.num_context if trace.layout.num_context else 0.0
        rows.append((str(layer), str(count), f"{100 * share:.1f}", *found))
    return rows


def answer_rows(trace: Trace, view: TraceView) -> list[tuple[str, ...]]:
    """The likeliest first tokens, then the times."""
    rows: list[tuple[str, ...]] = [
        ("first token", short(one.text, 24), f"{one.probability:.4f}") for one in view.candidates
    ]
    timing = trace.report["timing"]
    names = {
        "load_s": "load",
        "select_s": "select",
        "recompute_s": "recompute",
        "ttft_s": "first token",
        "decode_s": "decode",
    }
    return rows + [("time", name, f"{1e3 * timing[field]:.1f} ms") for field, name in names.items()]
