"""What a policy is: which rows of the context are computed, and how that narrows from layer to layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from pictool.core import Layout, RowMask


@dataclass(frozen=True)
class Policy(ABC):
    """One linking algorithm; its fields are its hyperparameters. The tail is computed in full by every policy."""

    name: ClassVar[str]
    reference: ClassVar[str]  # paper and section
    default_sinks: ClassVar[int] = 0  # how it wants its documents compiled

    @property
    def params(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sinks(self) -> int:
        """Dummy tokens in front of documents that are compiled for this policy."""
        return self.default_sinks

    @abstractmethod
    def select(self, layout: Layout) -> RowMask:
        """Before layer 0: bool [N] over head and chunks, True where a row is computed."""


def no_rows(layout: Layout) -> RowMask:
    return np.zeros(layout.num_context, dtype=bool)


def first_rows(layout: Layout, k: int) -> RowMask:
    """The first min(k, n_c) tokens of every chunk but the head; with an empty head the first chunk is the head."""
    rows = no_rows(layout)
    chunks = layout.chunks if layout.head[1] > 0 else layout.chunks[1:]
    for start, end in chunks:
        rows[start : min(start + k, end)] = True
    return rows
