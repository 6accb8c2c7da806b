"""Objects' layers on their way to an image that has them all put to their places at once (`graphs/`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StagedPart:
    """An object of `num_tokens` tokens, of which [first, end) are linked at position `start`.

    Its layers are numbers of the model's dtype; or `is_coded`: codes of float8, and after them the scales of their
    heads (`Float8E4M3Head.unpack`).
    """

    num_tokens: int
    first: int
    end: int
    start: int
    is_coded: bool = False


class StagedLayers(Protocol):
    """What copies the layers of some parts to the device, and puts them to their places in an image."""

    def load(self, layer: int, sources: Sequence[Tensor]) -> torch.Event:
        """Queue a layer of every part, uint8 each; returns the event after which it is in the image."""
        ...

    def synchronize(self) -> None:
        """Wait until nothing is copied any more."""
        ...
