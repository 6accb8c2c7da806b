"""The speculative model (SpecCache): a small one that reads prompts, or chunks for fixup tables, for a larger one."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from pictool.runtime.model import embedded_path, load_model

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def speculative_name(model: Model) -> str | None:
    """The speculative model of `model`, if it is known: the embedded one has `embedded-small`."""
    return "embedded-small" if model.directory == embedded_path("embedded") else None


def open_speculative(name: str, target: Model) -> Model:
    """Load a speculative model, once per process, in the target's dtype and on its device.

    Raises:
        ModelError: not a model, or not supported.
    """
    return _open(name, target.device, target.dtype)


@lru_cache(maxsize=2)
def _open(name: str, device: str, dtype: str) -> Model:
    return load_model(name, device, dtype)
