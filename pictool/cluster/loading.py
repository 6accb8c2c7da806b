"""The model of a process that works for another one: the same, or none."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

from pictool.errors import InputError, ModelError

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class ModelSpec:
    """A model as a driver has it.

    Fields:
        name: its directory or name, as `load_model` takes it.
        fingerprints: of the driver's model and tokenizer; None: not compared.
        threads: of computation.
        version: of the package, which all must have; "": not compared.
    """

    name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    salt: str = field(default="", repr=False)
    fingerprints: tuple[str, str] | None = None
    threads: int = 1
    version: str = ""

    def load(self) -> Model:
        """The model, with `threads` threads in this process; its weights are loaded when they are needed.

        Raises:
            InputError or ModelError: it, or the package, is not what the driver has.
        """
        if self.version not in ("", version("pictool")):
            raise InputError(
                f"a worker has pictool {version('pictool')}, the driver {self.version}; install the same version on "
                "all machines"
            )
        import torch

        from pictool.runtime.model import load_model

        torch.set_num_threads(self.threads)
        model = load_model(self.name, self.device, self.dtype, self.salt)
        if self.fingerprints not in (None, (model.target.model, model.target.tokenizer)):
            raise ModelError(
                f"{model.name}: a worker's model differs from the driver's; install the same model on all machines"
            )
        return model
