"""The tables of the compare view: the numbers of `pic diff`, of every link against the first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from pictool.trace.distributions import log_softmax
from pictool.trace.labels import short, visible
from pictool.tui.widgets.table import Column

if TYPE_CHECKING:
    from pictool.trace.diff import TraceDiff
    from pictool.tui.opened import Opened

POLICY_COLUMNS = (
    Column("policy", 18), Column("computed", 9, True), Column("Jaccard", 7, True), Column("common", 6, True),
    Column("KL", 8, True), Column("|logit|", 7, True), Column("answer", 0),
)  # fmt: skip


def policy_rows(opened: Sequence[Opened], diffs: Sequence[TraceDiff]) -> list[tuple[str, ...]]:
    """Each link against the first: overlap, tokens in common, KL(first ‖ this), largest difference of a logit."""
    found = []
    for one, diff in zip(opened, (None, *diffs), strict=True):
        against = ["", "", "", ""]
        if diff is not None:
            against = [f"{diff.selection.overall:.3f}", str(diff.common), f"{diff.kl[0]:.3g}", f"{diff.max_logit:.3g}"]
        computed = f"{one.trace.report['tokens']['recomputed']:.1f}"
        found.append((short(one.trace.label, 18), computed, *against, visible(one.trace.answer)))
    return found


def jaccard_rows(diffs: Sequence[TraceDiff]) -> list[tuple[str, ...]]:
    """Overlap of each selection with the first one's, layer by layer, then of all."""
    layers = range(len(diffs[0].selection.jaccard))
    rows = [(str(layer), *(f"{diff.selection.jaccard[layer]:.3f}" for diff in diffs)) for layer in layers]
    return [*rows, ("all", *(f"{diff.selection.overall:.3f}" for diff in diffs))]


def first_columns(opened: Sequence[Opened]) -> list[Column]:
    """The token, its probability under each link, and how far its logit is from the first link's."""
    names = [short(one.trace.label, 16) for one in opened]
    logits = [Column(f"logit {name}", max(10, len(name) + 6), True) for name in names[1:]]
    return [Column("token", 10), *(Column(name, max(7, len(name)), True) for name in names), *logits]


def first_rows(opened: Sequence[Opened], diffs: Sequence[TraceDiff]) -> list[tuple[str, ...]]:
    """Candidates of any link for the first token, the likeliest first."""
    texts = {one.id: one.text for diff in diffs for one in diff.candidates}
    shares = [np.exp(log_softmax(one.trace.logits)) for one in opened]
    logits = [one.trace.logits.astype(np.float64) for one in opened]
    order = sorted(texts, key=lambda token: -max(share[token] for share in shares))
    rows = []
    for token in order:
        apart = [f"{one[token] - logits[0][token]:+.2f}" for one in logits[1:]]
        rows.append((short(texts[token], 10), *(f"{share[token]:.4f}" for share in shares), *apart))
    return rows


def answer_columns(opened: Sequence[Opened]) -> list[Column]:
    names = [short(one.trace.label, 16) for one in opened]
    return [Column("", 1), Column("token", 5, True), *(Column(name, 22) for name in names)]


def answer_rows(opened: Sequence[Opened]) -> list[tuple[str, ...]]:
    """The answers token by token, with log-probabilities; ≠ from where on one of them differs from the first."""
    rows, mark = [], ""
    for index, tokens in enumerate(zip_longest(*(one.trace.generated for one in opened))):
        if any((one and one.id) != (tokens[0] and tokens[0].id) for one in tokens):
            mark = "≠"
        said = ["" if one is None else f"{short(one.text, 13)} {one.logprob:.3g}" for one in tokens]
        rows.append((mark, str(index), *said))
    return rows
