"""The policies that are compared, under the labels of tables and results files: `full` first, always."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pictool.linker.grid import LabelledPolicy, parse_repeatable
from pictool.linker.policies import BASELINE, make_policy

DEFAULT_POLICIES = ("full", "auto", "naive", "legolink-16", "cacheblend-15")
FULL = LabelledPolicy(BASELINE, make_policy(BASELINE))
_FIRST_LABELS = (BASELINE, "naive")  # in tables: the two ends between which the others are
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def parse_policies(names: Sequence[str]) -> list[LabelledPolicy]:
    """The policies of names as users write them (see `parse_repeatable`), and `full`, in the order of tables.

    Raises:
        InputError: no such policy or field, or a value that does not fit.
    """
    by_label = {labelled.label: labelled for labelled in (FULL, *parse_repeatable(names))}
    return sorted(by_label.values(), key=_table_order)


def _table_order(labelled: LabelledPolicy) -> tuple[Any, ...]:
    """Full, naive, the others; numbers in labels by their value."""
    first = _FIRST_LABELS.index(labelled.label) if labelled.label in _FIRST_LABELS else len(_FIRST_LABELS)
    parts = _NUMBER.split(labelled.label)  # text, number, text, …
    return first, [float(part) if i % 2 else part for i, part in enumerate(parts)]
