"""Rows of a hybrid's prompt: a chunk's states are stored at one cut, so what is computed of it ends there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pictool.errors import InputError
from pictool.linker.context import ReusePlan
from pictool.linker.policies.base import Policy, Selection


def round_to_cuts(
    reused: ReusePlan, selection: Selection, policy: Policy, warn: Callable[[str], None]
) -> tuple[ReusePlan, Selection]:
    """Compute every object's tokens up to its cut. One that is linked in part, or has none there, is computed whole.

    Raises:
        InputError: an object that was named has its cut after tokens which the policy does not compute at all.
    """
    rows, kept = selection.rows.copy(), []
    for part in reused.placed:
        own, cut = rows[part.start : part.end], part.file.meta.cut
        count = int(own.sum())
        assert own[:count].all() and cut is not None
        if count < len(own) and part.is_whole and part.file.meta.has_states and count <= cut:
            if policy.needs.cut == 0 and cut:
                raise InputError(
                    f"{part.file.name}: its states are stored after {cut} tokens, but {policy.name} computes none; "
                    "name its text instead, or use legolink"
                )
            own[:cut] = True
            kept.append(part)
        elif count < len(own):
            own[:] = True
            if part.file.meta.has_states:
                why = (
                    f"its states are stored after {cut} of its tokens, not {count}"
                    if part.is_whole
                    else "it is linked in part"
                )
                warn(f"{part.file.name}: {why}; it is computed whole")
    return replace(reused, placed=kept), replace(selection, rows=rows)
