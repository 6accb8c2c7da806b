"""`pic inspect A B --diff`: two links of one prompt, from their traces. Needs no model and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pictool.commands.console.outputs import print_json

if TYPE_CHECKING:
    from pictool.core import RowMask
    from pictool.trace.diff import TraceDiff
    from pictool.trace.format import GeneratedToken, Trace

MAX_LISTED = 24  # tokens


def show_diff(names: tuple[str, str], as_json: bool) -> None:
    """Compare two traces of the same prompt."""
    from pictool.commands.traces.json_form import diff_json
    from pictool.trace.diff import diff_traces
    from pictool.trace.format import read_trace

    first, second = (read_trace(Path(name)) for name in names)
    diff = diff_traces(first, second, names)
    if as_json:
        print_json(diff_json(names, diff))
    else:
        print_diff(names, first, second, diff)


def print_diff(names: tuple[str, str], a: Trace, b: Trace, diff: TraceDiff) -> None:
    from pictool.commands.console.terminal import bars, heading, open_screen, table
    from pictool.escapes import visible
    from pictool.trace.labels import short

    screen = open_screen()
    for letter, trace, name in (("A", a, names[0]), ("B", b, names[1])):
        counts = f"{trace.report['tokens']['recomputed']:.1f} of {trace.layout.num_context} context tokens per layer"
        screen.print(f"{letter}  {visible(trace.policy)} ({visible(name)}): {counts}", overflow="fold")
        screen.print(f"   {visible(trace.answer)}", overflow="fold")
    if diff.other_objects:
        screen.print(f"{len(diff.other_objects)} of {a.num_documents} chunks were linked from other objects")
    heading(screen, "selections: overlap (Jaccard) by layer")
    each = [(f"layer {i}", float(x), f"{x:.3f}") for i, x in enumerate(diff.selection.jaccard)]
    bars(screen, [*each, ("all", diff.selection.overall, f"{diff.selection.overall:.3f}")], 1.0)
    tokens = {name: int(getattr(diff.selection, name).sum()) for name in ("both", "only_a", "only_b")}
    screen.print(
        f"tokens computed at some layer: {tokens['both']} by both, {tokens['only_a']} by A alone, "
        f"{tokens['only_b']} by B alone"
    )
    for letter, mask in (("A", diff.selection.only_a), ("B", diff.selection.only_b)):
        if mask.any():
            screen.print(f"{letter} alone: {_listed(a, mask)}", overflow="fold")
    heading(screen, "answers")
    screen.print(_parting(diff), markup=False)
    heading(screen, "first token: candidates by probability")
    rows = [
        [short(token.text, 16), *(f"{x:.4f}" for x in token.probabilities), *(f"{x:.2f}" for x in token.logits)]
        for token in diff.candidates[:8]
    ]
    screen.print(table(["token", "A", "B", "logit A", "logit B"], rows))
    screen.print(
        f"KL(A || B) {diff.kl[0]:.3g}, KL(B || A) {diff.kl[1]:.3g}; largest difference of a logit {diff.max_logit:.3g}"
    )


def _listed(trace: Trace, mask: RowMask) -> str:
    """Tokens by their text and position (see `position_label`), as many as are readable."""
    from pictool.trace.labels import position_label, short

    positions = [int(position) for position in mask.nonzero()[0]]
    shown = ", ".join(f'"{short(trace.pieces[i], 16)}" {position_label(trace, i)}' for i in positions[:MAX_LISTED])
    return shown + (f", and {len(positions) - MAX_LISTED} more" if len(positions) > MAX_LISTED else "")


def _parting(diff: TraceDiff) -> str:
    if diff.parting == (None, None):
        return f"the same {diff.common} tokens"
    a, b = (_quoted(token) for token in diff.parting)
    return f"{diff.common} tokens in common, then A says {a} and B says {b}"


def _quoted(token: GeneratedToken | None) -> str:
    from pictool.escapes import visible

    return "nothing" if token is None else f'"{visible(token.text)}" ({token.logprob:.3g} nats)'
