"""Engines: what answers a request. One contract (`base.py`), with three implementations.

`torch` is ours, `llamacpp` runs GGUF files; the third asks servers with vLLM (`serve/backends/upstream`), in which
`vllm` links.

Another package adds an engine by an entry point of the group `pictool.engines` that names a subclass of `Engine`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from pictool.errors import InputError
from pictool.plugins import load_class
from pictool.runtime.gguf import is_gguf

if TYPE_CHECKING:
    from pictool.engines.base import Engine
    from pictool.engines.torch import TorchEngine
    from pictool.runtime.model import Model

DEFAULT, GGUF = "torch", "llamacpp"
SERVED = "vllm"  # a router's, in front of its servers: no engine of this process
NOT_HERE = (
    "vLLM runs behind a server: use pic serve --engine vllm, or pic serve --upstream URL; in your own process, use "
    "vllm.LLM(kv_transfer_config=…) with PicConnector (docs/reference/vllm.md)"
)
_GROUP = "pictool.engines"
_BUILTIN = {
    "torch": "pictool.engines.torch:TorchEngine",
    "llamacpp": "pictool.engines.llamacpp.engine:LlamaCppEngine",
}  # fmt: skip


def engine_name(model: str | None, named: str | None = None) -> str:
    """The engine that is named, else the one for a model's name: llama.cpp for a GGUF file, where it is installed."""
    return named or (GGUF if is_gguf(model) and find_spec("llama_cpp") else DEFAULT)


def engine_names() -> list[str]:
    """The engines that `engine_class` knows."""
    return sorted({*_BUILTIN, *(entry.name for entry in entry_points(group=_GROUP))})


def engine_class(name: str) -> type[Engine]:
    """An engine by its name; only its own module is imported.

    Raises:
        InputError: no engine of this name.
        PluginError: one of another package that cannot be loaded, or is no engine.
    """
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        return cast("type[Engine]", getattr(importlib.import_module(module), attribute))
    for entry in entry_points(group=_GROUP, name=name):
        from pictool.engines.base import Engine

        return load_class(entry, _GROUP, Engine)  # type: ignore[type-abstract]
    if name == SERVED:
        raise InputError(f"engine {name!r}: {NOT_HERE}")
    raise InputError(f"engine {name!r}: must be {' or '.join(engine_names())}")


def engine_of(model: Model) -> type[TorchEngine]:
    """The engine in this process that runs a model."""
    return cast("type[TorchEngine]", engine_class(model.engine))
