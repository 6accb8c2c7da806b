"""The process of `WorkerJob`: read requests from standard input until it ends, and reply to each."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pictool.commands.common import open_model, open_store
from pictool.commands.config import setting
from pictool.errors import PicError
from pictool.tui.services import LinkForm, PolicyChoice

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.runtime.model import Model
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.trace.format import Trace

Say = Callable[[str, Any], None]  # a kind of reply and its value


class Worker:
    """Runs requests, and keeps the models that it has loaded."""

    def __init__(
        self, say: Say, *, store: str | None, model: str | None, device: str | None, dtype: str | None
    ) -> None:
        self._say, self._store, self._model, self._device, self._dtype = say, open_store(store), model, device, dtype
        self._models: dict[tuple[str | None, str | None], Model] = {}

    def policies(self) -> Sequence[PolicyChoice]:
        """List every policy with the defaults of its fields; a field without a default is left out."""
        from dataclasses import MISSING, fields

        from pictool.linker.policies import policies

        return [
            PolicyChoice(name, {field.name: field.default for field in fields(policy) if field.default is not MISSING})
            for name, policy in policies().items()
        ]

    def link(self, form: LinkForm) -> Path:
        from pictool.commands.link import parse_fields
        from pictool.commands.outputs import output_path
        from pictool.engines import DEFAULT, engine_class
        from pictool.linker.policies import make_policy
        from pictool.linker.spec import Spec

        path = output_path("trace", form.trace, form.documents)
        policy = make_policy(form.algo, parse_fields(form.fields))
        model = self._open(form.model or self._model, self._dtype)
        spec = Spec(
            form.query, form.documents, policy, setting("head", None), setting("query_template", None),
            max_new_tokens=form.max_new_tokens,
        )  # fmt: skip
        self._say("note", f"linking {len(form.documents)} documents with {form.algo}")
        with engine_class(DEFAULT)(model, self._store) as engine:
            engine.answer(spec, on_text=self._text, on_compile=self._compiled).write_trace(path)
        return path

    def analyse(self, trace: Trace, name: str, layer: int | None) -> TraceAnalysis:
        from pictool.trace.analysis import analyse_trace

        model = self._open(self._model or trace.report["model"], self._dtype or trace.target.dtype)
        self._say("note", "linking again, and in full")
        return analyse_trace(model, self._store, trace, name, layer=layer, on_compile=self._compiled)

    def attention_sinks(self, key: str) -> AttentionSinks:
        from pictool.commands.inspect_object import profile_of

        with self._store.peek(key) as file:
            model = self._open(self._model, self._dtype or file.meta.target.dtype)
            self._say("note", f"reading its {file.meta.num_tokens} tokens alone")
            return profile_of(file, model)

    def _open(self, name: str | None, dtype: str | None) -> Model:
        if (name, dtype) not in self._models:
            self._say("note", "loading the model")
            self._models[name, dtype] = open_model(name, self._device, dtype)
        return self._models[name, dtype]

    def _text(self, piece: str) -> None:
        self._say("text", piece)

    def _compiled(self, done: Compiled) -> None:
        self._say("note", f"compiled {done.chunk.source} ({len(done.chunk)} tokens)")


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Reply to requests until there are no more."""

    def say(kind: str, value: Any) -> None:
        pickle.dump((kind, value), replies, protocol=pickle.HIGHEST_PROTOCOL)
        replies.flush()

    setup, worker = pickle.load(requests), None
    while True:
        try:
            name, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            worker = worker or Worker(say, **setup)
            say("done", getattr(worker, name)(*arguments))
        except PicError as error:
            say("failed", type(error)(str(error)))
        except Exception as error:  # the TUI shows it and goes on
            say("failed", PicError(f"{type(error).__name__}: {error}"))


def main() -> None:
    """Send replies to standard output, and everything else that is printed there to standard error."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
