"""The process of `WorkerJob`: read requests from standard input until it ends, and reply to each."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import PicError
from pictool.tui.services import LinkForm

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.engines.base import Engine
    from pictool.runtime.model import Model
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.trace.format import Trace

Say = Callable[[str, Any], None]  # a kind of reply and its value


class TuiWorker:
    """Runs requests, and keeps the models that it has loaded, and their engines with the KV of earlier questions."""

    def __init__(self, say: Say, settings: Settings) -> None:
        self._say, self._settings, self._store = say, settings, open_store(settings)
        self._models: dict[tuple[str | None, str], Model] = {}
        self._engines: dict[str | None, Engine] = {}

    def link(self, form: LinkForm) -> Path | None:
        from pictool.commands.console.outputs import output_path
        from pictool.commands.linking.request import make_spec
        from pictool.engines import engine_class
        from pictool.linker.grid import parse_policy

        path = output_path("trace", form.trace, form.documents) if form.trace else None
        spec = make_spec(
            self._settings, form.query, parse_policy(form.algo), form.max_new_tokens, documents=[*form.documents]
        )
        model = self._open(form.model)
        model.on_note = cache(lambda text: self._say("text", f"[{text}]\n\n"))
        self._say("note", f"linking {len(form.documents)} documents with {form.algo}")
        make = engine_class(model.engine)
        if path is not None:
            with make(model, self._store) as engine:
                engine.answer(spec, on_text=self._text, on_compile=self._compiled).write_trace(path)
            return path
        if form.model not in self._engines:
            self._engines[form.model] = make(model, self._store, None)
        report = self._engines[form.model].answer(spec, on_text=self._text, on_compile=self._compiled).report()
        pool, whole = report.get("pool", {}), report["tokens"]["prompt"]
        reused, resident = pool.get("prefix", 0), pool.get("resident", 0)
        self._say("note", f"of {whole} tokens {reused} are of earlier prompts, {resident} of documents in memory")
        return None

    def analyse(self, trace: Trace, name: str) -> TraceAnalysis:
        from pictool.trace.analysis import analyse_trace

        named = self._settings.option
        model = self._open(named("model") or trace.report["model"], named("dtype") or trace.target.dtype)
        self._say("note", "linking again, and in full")
        return analyse_trace(model, self._store, trace, name, on_compile=self._compiled)

    def attention_sinks(self, key: str) -> AttentionSinks:
        from pictool.trace.attention_sinks import attention_sinks

        with self._store.peek(key) as file:
            model = self._open(None, self._settings.option("dtype") or file.meta.target.dtype)
            self._say("note", f"reading its {file.meta.num_tokens} tokens alone")
            file.meta.require(model.target, str(file.path))
            file.meta.require_known_context(file.name)
            file.require_key(file.meta.key)
            before = file.meta.after[0] if file.meta.after else ()
            return attention_sinks(model, file.tokens().tolist(), before)

    def _open(self, name: str | None, dtype: str | None = None) -> Model:
        """The model of the settings, or that of this name and dtype."""
        settings = self._settings.override(model=name, dtype=dtype)
        key = settings.model, settings.dtype
        if key not in self._models:
            self._say("note", "loading the model")
            self._models[key] = open_model(settings)
        return self._models[key]

    def _text(self, piece: str) -> None:
        self._say("text", piece)

    def _compiled(self, done: Compiled) -> None:
        self._say("note", f"compiled {done.chunk.source} ({len(done.chunk)} tokens)")


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Reply to requests until there are no more."""

    def say(kind: str, value: Any) -> None:
        pickle.dump((kind, value), replies, protocol=pickle.HIGHEST_PROTOCOL)
        replies.flush()

    settings, worker = pickle.load(requests), None
    while True:
        try:
            name, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            worker = worker or TuiWorker(say, settings)
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
