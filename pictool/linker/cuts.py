"""Rows of a hybrid's prompt: a chunk's states are stored at one cut, so what is computed of it ends there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pictool.linker.context import ReusePlan
from pictool.linker.policies.base import Policy, Selection


def round_to_cuts(
    reused: ReusePlan, selection: Selection, policy: Policy, warn: Callable[[str], None]
) -> tuple[ReusePlan, Selection]:
    """Compute every object's tokens up to its cut.

    What is linked in part, or has no states after the tokens that are computed, is computed whole; under a policy that
    computes none (`Needs.cut` 0) also what has them later. `warn` says so, if the object was compiled otherwise.
    """
    rows, kept = selection.rows.copy(), []
    for part in reused.placed:
        own, meta = rows[part.start : part.end], part.file.meta
        count, cut = int(own.sum()), meta.cut
        assert own[:count].all() and cut is not None
        if count == len(own):
            continue
        if part.is_whole and meta.has_states and (count <= cut if policy.needs.cut else count == cut):
            own[:cut] = True
            kept.append(part)
            continue
        own[:] = True
        if not part.is_whole:
            warn(f"{part.file.name}: is linked in part, without its states; it is computed whole")
        elif meta.has_states:
            warn(f"{part.file.name}: has states after {cut} tokens, but {count} are computed; it is computed whole")
    return replace(reused, placed=kept), replace(selection, rows=rows)
