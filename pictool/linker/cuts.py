"""Rows of a hybrid's prompt: stored tokens need a map of the states before them, which objects have from cuts on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pictool.core import RowMask
from pictool.linker.loader import PlacedObject
from pictool.linker.objects import ObjectContext, ReusePlan
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.resolve import Part


class HybridContext(ObjectContext):
    """The objects of a hybrid's prompt, which have states from their cuts on."""

    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        reused = super().open(prompt, parts, policy, selection, opened)
        selection = selection or policy.select(reused.prompt)
        return round_to_cuts(replace(reused, selection=selection), policy, self._store.on_warning)


def round_to_cuts(reused: ReusePlan, policy: Policy, warn: Callable[[str], None]) -> ReusePlan:
    """Compute every object's tokens up to its cut.

    What is linked in part, or has no states after the tokens that are computed, is computed whole; under a policy that
    computes none (`Needs.cut` 0) also what has them later. `warn` says so, if the object was compiled otherwise.
    """
    selection = reused.selection
    assert selection is not None
    rows, kept = selection.rows.copy(), []
    for part in reused.placed:
        own = rows[part.start : part.end]
        if _round_to_cut(part, own, policy):
            kept.append(part)
            continue
        is_selected, meta = own.all(), part.file.meta
        count = int(own.sum())
        own[:] = True
        if not is_selected and not part.is_whole:
            warn(f"{part.file.name}: is linked in part, without its states; all of it is computed")
        elif not is_selected and meta.has_states:
            warn(
                f"{part.file.name}: has states after {meta.cut} tokens, but {count} are computed; all of it is computed"
            )
    return replace(reused, placed=kept, selection=replace(selection, rows=rows))


def _round_to_cut(part: PlacedObject, own: RowMask, policy: Policy) -> bool:
    """Whether a part stays, with `own` up to its cut; if not, nothing is done, and it is to be computed whole."""
    count, meta = int(own.sum()), part.file.meta
    assert own[:count].all() and meta.cut is not None
    if count == len(own) or not part.is_whole or not meta.has_states:
        return False
    if count > meta.cut or (count < meta.cut and not policy.needs.cut):
        return False
    own[: meta.cut] = True
    return True
