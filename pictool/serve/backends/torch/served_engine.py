"""The torch engine as a task of the engine's thread uses it: other tasks run between its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks, require_within
from pictool.compiler.compile import Compiled
from pictool.core import Chunk, CompileOptions, Text
from pictool.engines.base import Answer, LinkResult
from pictool.engines.torch import TorchEngine
from pictool.linker.spec import Document, Spec
from pictool.serve.backends.torch.engine_thread import EngineTask

if TYPE_CHECKING:
    from pictool.runtime.model import Model


class ServedEngine(TorchEngine):
    """An engine that lets other tasks run after a document that is compiled, a link, and a token.

    A document ends a turn of the task, and so does an answer before the next one begins.

    Args:
        engine: whose model, store and pool it works with.
        max_tokens: of an answer at most; None: no limit beside the request's own.
    """

    def __init__(self, engine: TorchEngine, task: EngineTask, max_tokens: int | None = None) -> None:
        super().__init__(engine.model, engine.store, residents=engine.residents)
        self._task, self._max_tokens, self._has_answered = task, max_tokens, False

    def compile(
        self, chunks: Iterable[Chunk | str], options: CompileOptions = CompileOptions(), *, force: bool = False,
        probe_model: Model | None = None, on_done: Callable[[Compiled], None] | None = None,
    ) -> list[Compiled]:  # fmt: skip
        def report(compiled: Compiled) -> None:
            if on_done is not None:
                on_done(compiled)
            if compiled.is_new:
                self._task.checkpoint(ends_turn=True)

        return super().compile(chunks, options, force=force, probe_model=probe_model, on_done=report)

    def link(self, spec: Spec, *, on_compile: Callable[[Compiled], None] | None = None) -> LinkResult:
        def report(compiled: Compiled) -> None:
            if on_compile is not None:
                on_compile(compiled)
            self._task.checkpoint(ends_turn=True)

        return super().link(spec, on_compile=report)

    def run(
        self, spec: Spec, *, on_text: Callable[[str], None] | None = None,
        on_compile: Callable[[Compiled], None] | None = None, wants_logits: bool = True,
    ) -> Answer:  # fmt: skip
        if self._has_answered:
            self._task.checkpoint(ends_turn=True)
        self._has_answered = True
        if self._max_tokens is not None:
            spec = replace(spec, max_new_tokens=min(spec.max_new_tokens, self._max_tokens))
        return super().run(spec, on_text=on_text, on_compile=on_compile, wants_logits=wants_logits)

    def warm_up(self, spec: Spec, on_compile: Callable[[Compiled], None] | None = None) -> None:
        """The server has answered before."""

    def _decode(self, spec: Spec, result: LinkResult, on_text: Callable[[str], None] | None = None) -> Answer:
        def report(text: str) -> None:
            if on_text is not None:
                on_text(text)
            self._task.checkpoint()

        self._task.checkpoint()
        return super()._decode(spec, result, report)


def with_chunks(model: Model, spec: Spec, task: EngineTask) -> Spec:
    """A spec whose texts are chunks; others have their steps between two documents."""
    documents: list[Document] = []
    for document in spec.documents:
        if isinstance(document, Text):
            require_within(model, document.text, document.source)
            documents += make_chunks(model, document.text, document.source, spec.chunk_tokens)
            task.checkpoint()
        else:
            documents.append(document)
    return replace(spec, documents=documents)
