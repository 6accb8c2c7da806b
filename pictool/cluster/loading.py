"""The model of a process that works for another one: the same, or none."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from pictool.errors import InputError, ModelError

if TYPE_CHECKING:
    from pictool.runtime.model import Model


class ModelSpec(Protocol):
    """A model as a driver has it.

    Fields:
        fingerprints: of the driver's model and tokenizer; None: not compared.
        threads: of computation.
        version: of the package, which all must have; "": not compared.
    """

    @property
    def model(self) -> str | None: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def salt(self) -> str: ...
    @property
    def fingerprints(self) -> tuple[str, str] | None: ...
    @property
    def threads(self) -> int: ...
    @property
    def version(self) -> str: ...


def load_same_model(spec: ModelSpec) -> Model:
    """The model, with `threads` threads in this process; its weights are loaded when they are needed.

    Raises:
        InputError or ModelError: it, or the package, is not what the driver has.
    """
    if spec.version not in ("", version("pictool")):
        raise InputError(
            f"a worker has pictool {version('pictool')}, the driver {spec.version}; install the same on all machines"
        )
    import torch

    from pictool.runtime.model import load_model

    torch.set_num_threads(spec.threads)
    model = load_model(spec.model, spec.device, spec.dtype, spec.salt)
    if spec.fingerprints not in (None, (model.target.model, model.target.tokenizer)):
        raise ModelError(
            f"{model.name}: a worker has another model than the driver; install the same model on all machines"
        )
    return model
