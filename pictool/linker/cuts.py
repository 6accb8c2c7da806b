"""Rows of a hybrid's prompt: stored tokens need a map of the states before them, so where these begin is rounded.

An object has a map from one cut on. A policy that computes rows anywhere, by tables, computes few runs of a chunk, and
the map of a run of stored tokens [a, b) is that of the object of the chunk's first b tokens, of cut a.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pictool.core import Chunk, CompileOptions, RowMask
from pictool.errors import ObjectError
from pictool.linker.loader import PlacedObject
from pictool.linker.objects import ObjectContext, ReusePlan
from pictool.linker.policies.base import Policy, Prompt, Scores, Selection
from pictool.linker.resolve import Part

if TYPE_CHECKING:
    from pictool.runtime.model import Model

RUNS = 2  # computed ones of a chunk, at most: more win little (docs/studies/answers.md)
Warn = Callable[[str], None]


class HybridContext(ObjectContext):
    """The objects of a hybrid's prompt, which have states from their cuts on, and the maps of its stored runs."""

    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        reused = super().open(prompt, parts, policy, selection, opened)
        selection, states = selection or policy.select(reused.prompt), prompt.model.geometry.states
        assert states is not None
        reused = round_to_cuts(replace(reused, selection=selection), policy, states.columns, self._store.on_warning)
        return self._open_maps(reused, opened)

    def _open_maps(self, reused: ReusePlan, opened: ExitStack) -> ReusePlan:
        """Open the objects with the states of stored runs (`PlacedObject.stored`)."""
        model, placed = reused.prompt.model, list[PlacedObject]()
        maps_of = {part: [_map_part(model, part, run) for run in part.stored] for part in reused.placed}
        missing = list(dict.fromkeys(part for parts in maps_of.values() for part in parts if part.file is None))
        texts = self._texts
        self._texts = lambda: texts() | {part.key(model) for part in missing}
        files, compile_s = self._open_objects(model, missing, opened, None)
        of_part = dict(zip(missing, files, strict=True))
        for own, file in of_part.items():
            if file.meta.cut != own.options.cut:
                raise ObjectError(
                    f"{file.name}: has states after {file.meta.cut} tokens, not {own.options.cut}; delete it"
                )
        for part, parts in maps_of.items():
            placed.append(replace(part, maps=tuple(own.file or of_part[own] for own in parts)))
        return replace(reused, placed=placed, compile_s=reused.compile_s + compile_s)


def round_to_cuts(reused: ReusePlan, policy: Policy, columns: int, warn: Warn) -> ReusePlan:
    """Compute every object's tokens up to its cut, or by a policy that reads tables in runs.

    What is linked in part, or has no states after the tokens that are computed, is computed whole; under a policy that
    computes none (`Needs.cut` 0) also what has them later. `warn` says so, if the object was compiled otherwise.

    Args:
        columns: how far a convolution reads back; no cut but 0 is before.
    """
    selection = reused.selection
    assert selection is not None
    rows, kept = selection.rows.copy(), []
    for part in reused.placed:
        own = rows[part.start : part.end]
        scores = None if selection.scores is None else selection.scores[part.start : part.end]
        stays = _round_to_runs(part, own, scores, columns) if policy.needs.tables else _round_to_cut(part, own, policy)
        if stays is not None:
            kept.append(stays)
            continue
        is_selected, meta = own.all(), part.file.meta
        count = int(own.sum())
        own[:] = True
        if not is_selected and not part.is_whole:
            warn(f"{part.file.name}: is linked in part, without its states; it is computed whole")
        elif not is_selected and meta.has_states:
            warn(
                f"{part.file.name}: has states after {meta.cut} tokens, but {count} are computed; it is computed whole"
            )
    return replace(reused, placed=kept, selection=replace(selection, rows=rows))


def _map_part(model: Model, part: PlacedObject, run: tuple[int, int]) -> Part:
    """What has the states of a run [a, b) of an object's tokens: itself, or the object of its first b tokens."""
    (cut, end), meta = run, part.file.meta
    if (meta.cut, meta.num_tokens) == run:
        return Part(Chunk("", (), part.file.name), file=part.file)
    tokens = tuple(part.file.tokens()[:end].tolist())
    text = part.file.text() if end == meta.num_tokens else str(model.tokenizer.decode(list(tokens)))
    return Part(Chunk(text, tokens, part.file.name), CompileOptions(codec=meta.codec, cut=cut))


def _round_to_cut(part: PlacedObject, own: RowMask, policy: Policy) -> PlacedObject | None:
    """The part, and `own` up to its cut; None, and nothing is done, if it is to be computed whole."""
    count, meta = int(own.sum()), part.file.meta
    assert own[:count].all() and meta.cut is not None
    if count == len(own) or not part.is_whole or not meta.has_states:
        return None
    if count > meta.cut or (count < meta.cut and not policy.needs.cut):
        return None
    own[: meta.cut] = True
    return part


def _round_to_runs(part: PlacedObject, own: RowMask, scores: Scores | None, columns: int) -> PlacedObject | None:
    """The part with its stored runs, and `own` in at most `RUNS`; None if it is to be computed whole."""
    if own.all() or not part.is_whole:
        return None
    if scores is not None and len(_runs(own)) > RUNS:
        own[:] = best_runs(scores.astype("<f4").tobytes(), int(own.sum()), RUNS)
    own[:columns] |= own[:columns].any()
    stored = _runs(~own)
    return replace(part, stored=stored) if stored else None


def _runs(rows: RowMask) -> tuple[tuple[int, int], ...]:
    """[start, end) of the runs of rows."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], rows, [False]]))).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


@lru_cache(maxsize=1024)  # the same objects are linked for one request after the other
def best_runs(scores: bytes, rows: int, runs: int) -> RowMask:
    """Exactly so many rows, in at most so many runs, whose float32 scores have the highest sum; not to be written to.

    By dynamic programming over the tokens: the best sum with a number of rows and runs so far, outside of a run and
    inside of one.
    """
    table = np.frombuffer(scores, dtype="<f4").astype(np.float64)
    best = np.full((2, rows + 1, runs + 1), -np.inf)
    best[0, 0, 0] = 0.0
    was_inside = np.zeros((len(table), *best.shape), dtype=bool)  # of the token before the best one of each
    for at, score in enumerate(table):
        grown, begun = np.full_like(best, -np.inf)
        grown[1:], begun[1:, 1:] = best[1, :-1] + score, best[0, :-1, :-1] + score
        was_inside[at] = best[1] > best[0], grown >= begun
        best = np.stack([best.max(0), np.maximum(grown, begun)])
    chosen, left = np.zeros(len(table), dtype=bool), rows
    inside, run = divmod(int(best[:, rows].argmax()), runs + 1)
    for at in reversed(range(len(table))):
        before = was_inside[at, inside, left, run]
        chosen[at] = bool(inside)
        left, run, inside = left - inside, run - (inside and not before), int(before)
    chosen.setflags(write=False)
    return chosen
