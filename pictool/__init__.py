"""pictool: compile documents to KV objects, link them into prompts, in any order.

    import pictool

    model, store = pictool.load_model(), pictool.Store()
    pictool.compile(model, store, ["Gadwick holds the Vulry festival.\\n"])
    policy = pictool.make_policy("legolink", {"k": 16})
    linked = pictool.link(model, store, ["a.txt", "b.txt"], "Question: Who?\\nAnswer:", policy)
    print(pictool.generate(model, linked.image, 16).text)

    request = pictool.Request("Which festival does Gadwick hold?", ["a.txt", "b.txt"])
    print(pictool.answer(model, store, request, compare=True).text)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled as Compiled
    from pictool.compiler.compile import chunks_of_files as chunks_of_files
    from pictool.compiler.compile import compile as compile
    from pictool.core import Chunk as Chunk
    from pictool.core import Layout as Layout
    from pictool.engines.torch import Answer as Answer
    from pictool.engines.torch import Request as Request
    from pictool.engines.torch import answer as answer
    from pictool.errors import PicError as PicError
    from pictool.linker.link import Linked as Linked
    from pictool.linker.link import link as link
    from pictool.linker.policies import make_policy as make_policy
    from pictool.linker.policies import policies as policies
    from pictool.linker.policies.base import Policy as Policy
    from pictool.runtime.decode import Sampling as Sampling
    from pictool.runtime.decode import generate as generate
    from pictool.runtime.model import Model as Model
    from pictool.runtime.model import load_model as load_model
    from pictool.runtime.model import wrap_model as wrap_model
    from pictool.store.format import ObjectFile as ObjectFile
    from pictool.store.store import Store as Store

__version__ = "0.2.0"

_HOMES = {
    "Answer": "engines.torch", "Chunk": "core", "Compiled": "compiler.compile", "Layout": "core",
    "Linked": "linker.link", "Model": "runtime.model", "ObjectFile": "store.format", "PicError": "errors",
    "Policy": "linker.policies.base", "Request": "engines.torch", "Sampling": "runtime.decode",
    "Store": "store.store", "answer": "engines.torch", "chunks_of_files": "compiler.compile",
    "compile": "compiler.compile", "generate": "runtime.decode", "link": "linker.link",
    "load_model": "runtime.model", "make_policy": "linker.policies", "policies": "linker.policies",
    "wrap_model": "runtime.model",
}  # fmt: skip
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pictool' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pictool.{_HOMES[name]}"), name)
