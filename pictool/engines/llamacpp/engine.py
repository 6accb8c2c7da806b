"""The engine `llamacpp`: the torch engine's flow over a GGUF file, whose links and prefills llama.cpp computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pictool.engines.base import Feature
from pictool.engines.llamacpp.model import GgufModel
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.linker.prefixes import Prefixes
    from pictool.runtime.model import Model
    from pictool.store.store import Store


class LlamaCppEngine(TorchEngine):
    """What compiles, links and answers with a GGUF file."""

    name: ClassVar[str] = "llamacpp"
    title: ClassVar[str] = "llama.cpp"
    supports: ClassVar[frozenset[Feature]] = frozenset({"trace", "codecs", "chains", "plans", "pool"})

    def __init__(
        self, model: Model, store: Store, pool_bytes: int | None = 0, residents: Prefixes | None = None
    ) -> None:
        if not isinstance(model, GgufModel):
            raise InputError(f"--engine llamacpp: runs GGUF files, but {model.name} is not one; choose one with -m")
        super().__init__(model, store, pool_bytes, residents)

    @classmethod
    def open_pool(
        cls, model: Model, store: Store, num_bytes: int | None, keeps_prefixes: bool, kept: Store | None = None
    ) -> Prefixes | None:
        """See `TorchEngine.open_pool`. It keeps prefixes in any case, and objects only within them."""
        from pictool.engines.llamacpp.sequences import KeptSequences
        from pictool.runtime.memory.pool import default_pool_bytes

        assert isinstance(model, GgufModel)
        num_bytes = default_pool_bytes(model) if num_bytes is None else num_bytes
        return KeptSequences(model.stack, num_bytes, kept) if num_bytes else None
