"""pictool: compile documents to KV objects, link them into prompts, in any order.

    import pictool

    model, store = pictool.load_model(), pictool.Store()
    pictool.compile(model, store, ["Gadwick holds the Vulry festival.\\n"])
    policy = pictool.make_policy("legolink", {"k": 16})
    linked = pictool.link(model, store, ["a.txt", "b.txt"], "Question: Who?\\nAnswer:", policy)
    print(pictool.generate(model, linked.image, 16).text)

    spec = pictool.Spec("Which festival does Gadwick hold?", ["a.txt", "b.txt"])
    print(pictool.answer(model, store, spec, compare=True).text)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pictool.api import answer as answer
    from pictool.api import ask as ask
    from pictool.api import compile as compile
    from pictool.api import link as link
    from pictool.compiler.compile import Compiled as Compiled
    from pictool.compiler.compile import chunks_of_files as chunks_of_files
    from pictool.conversation import Reply as Reply
    from pictool.core import Chunk as Chunk
    from pictool.core import CompileOptions as CompileOptions
    from pictool.core import Layout as Layout
    from pictool.core import Message as Message
    from pictool.core import Sampling as Sampling
    from pictool.core import Text as Text
    from pictool.engines.base import Answer as Answer
    from pictool.engines.base import Engine as Engine
    from pictool.engines.torch import TorchEngine as TorchEngine
    from pictool.errors import PicError as PicError
    from pictool.linker.grid import named_policy
    from pictool.linker.link import Linked as Linked
    from pictool.linker.policies import policies as policies
    from pictool.linker.policies.base import Policy as Policy
    from pictool.linker.relocation import relocate as relocate
    from pictool.linker.relocation import repair as repair
    from pictool.linker.spec import Spec as Spec
    from pictool.runtime.decode import generate as generate
    from pictool.runtime.model import Model as Model
    from pictool.runtime.model import load_model as load_model
    from pictool.runtime.model import wrap_model as wrap_model
    from pictool.store.objects.format import ObjectFile as ObjectFile
    from pictool.store.store import Store as Store

    make_policy = named_policy
    Request = Spec  # as 0.1 called it

__version__ = "0.4.0"

_HOMES = {
    "Answer": "engines.base", "Chunk": "core", "CompileOptions": "core", "Compiled": "compiler.compile",
    "Engine": "engines.base", "Layout": "core", "Linked": "linker.link", "Message": "core", "Model": "runtime.model",
    "ObjectFile": "store.objects.format", "PicError": "errors", "Policy": "linker.policies.base",
    "Reply": "conversation", "Request": "linker.spec",
    "Sampling": "core", "Spec": "linker.spec", "Store": "store.store", "Text": "core", "TorchEngine": "engines.torch",
    "answer": "api", "ask": "api", "chunks_of_files": "compiler.compile", "compile": "api",
    "generate": "runtime.decode", "link": "api",
    "load_model": "runtime.model", "make_policy": "linker.grid",
    "open_gguf": "engines.llamacpp.model", "policies": "linker.policies",
    "relocate": "linker.relocation", "repair": "linker.relocation", "wrap_model": "runtime.model",
}  # fmt: skip
_RENAMED = {"Request": "Spec", "make_policy": "named_policy"}
__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # for a type checker every name is one of those above

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'pictool' has no attribute {name!r}")
        return getattr(importlib.import_module(f"pictool.{_HOMES[name]}"), _RENAMED.get(name, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
