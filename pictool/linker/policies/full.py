from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pictool.core import Layout, RowMask
from pictool.linker.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Fully recompute (EPIC §2.3, "FR"): every row; exactly the model's own prefill. What all else is compared with."""

    name: ClassVar[str] = "full"
    reference: ClassVar[str] = "EPIC §2.3"

    def select(self, layout: Layout) -> RowMask:
        return np.ones(layout.num_context, dtype=bool)
