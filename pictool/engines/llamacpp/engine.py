"""The engine `llamacpp`: the torch engine's flow over a GGUF file, whose links and prefills llama.cpp computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pictool.engines.base import Feature
from pictool.engines.llamacpp.model import GgufModel
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.linker.residency import ResidentObjects
    from pictool.runtime.model import Model
    from pictool.store.store import Store


class LlamaCppEngine(TorchEngine):
    """What compiles, links and answers with a GGUF file."""

    name: ClassVar[str] = "llamacpp"
    title: ClassVar[str] = "llama.cpp"
    supports: ClassVar[frozenset[Feature]] = frozenset({"trace", "codecs", "chains", "plans"})

    def __init__(
        self, model: Model, store: Store, pool_bytes: int | None = 0, residents: ResidentObjects | None = None
    ) -> None:
        if not isinstance(model, GgufModel):
            raise InputError(f"--engine llamacpp: runs GGUF files, but {model.name} is not one; choose one with -m")
        super().__init__(model, store, pool_bytes, residents)
