"""The engine over servers elsewhere, which speak to vLLM: what links, span queries and compilations need of one."""

from __future__ import annotations

import asyncio
import math
import queue
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import Compiled, OnCompile, object_key
from pictool.compiler.contexts import contexts_of
from pictool.core import AnswerFormat, Chunk, CompileOptions, Layout, Sampling
from pictool.engines.base import Answer, Comparison, Engine, Feature, LinkResult, compare_answers, outcome_of
from pictool.engines.vllm.request import FIELD, compile_proof
from pictool.errors import InputError, PicError
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import Part, lay_out_spec
from pictool.linker.spec import Spec
from pictool.reading import open_regular
from pictool.runtime.model import Model
from pictool.serve.backends.upstream.replicas import CompletionParams, Delta, Replicas, StreamEnd
from pictool.store.eviction import unmark_learned
from pictool.store.store import Store

LIKELY = 20  # tokens that two answers are compared over: as many as vLLM gives without an option
Request = tuple[Sequence[int], CompletionParams, str]  # with its salt
Event = Delta | StreamEnd


class EngineStopped(Exception):
    """An engine was stopped, since nobody waits for what it does."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose objects are in the store; `params` link it, None if there is nothing to link.

    `objects` are the source and the key of each document.
    """

    layout: Layout
    params: Mapping[str, Any] | None
    objects: Sequence[tuple[str, str]]


class UpstreamEngine(Engine):
    """Compiles and answers by requests to servers. Its methods wait: call them in a thread.

    Args:
        loop: the event loop that `replicas` are used in.
        later: nobody waits for what it compiles, so that all other work of vLLM's comes first.
        place: each request is sent within one, entered on the loop: what lets it wait for its turn.
    """

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    supports: ClassVar[frozenset[Feature]] = frozenset()

    def __init__(
        self, model: Model, store: Store, replicas: Replicas, loop: asyncio.AbstractEventLoop, *, later: bool = False,
        place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        super().__init__(model, store)
        self._replicas, self._loop, self._is_later, self._place = replicas, loop, later, place
        self._sending: Future[None] | None = None
        self._is_stopped = False

    def compile(
        self, chunks: Iterable[Chunk | str], options: CompileOptions = CompileOptions(), *, force: bool = False,
        on_done: OnCompile | None = None,
    ) -> list[Compiled]:  # fmt: skip
        """Compile by vLLM's own prefill; the objects equal the torch engine's up to the dtype's noise."""
        self.require_options(options)
        done: list[Compiled] = []
        for chunk in [chunk if isinstance(chunk, Chunk) else make_chunk(self.model, chunk, "text") for chunk in chunks]:
            if not chunk.tokens:
                raise InputError(f"{chunk.source}: has no tokens; nothing to compile")
            key = object_key(self.model, chunk, options)
            unmark_learned(self.store.root, [key])
            is_new = force or not self.store.has_whole(key)
            if is_new:
                self._compile(chunk, options)
                if not self.store.has(key):
                    raise InputError(
                        f"object {key[:12]}: its server wrote it to another store; give both the same --store or "
                        "--remote"
                    )
            done.append(Compiled(chunk, key, self.store.path(key), is_new))
            if on_done is not None:
                on_done(done[-1])
        return done

    def link(self, spec: Spec, *, on_compile: OnCompile | None = None) -> LinkResult:
        """Link a spec's prompt; vLLM chooses one token of it, which is dropped, and gives no logits."""
        self.require_supported(spec)
        return self.run(replace(spec, max_new_tokens=1), on_compile=on_compile).link

    def run(
        self, spec: Spec, *, on_text: Callable[[str], None] | None = None, on_compile: OnCompile | None = None
    ) -> Answer:
        answering = self._answering(spec, on_text, on_compile)
        for _, event, seconds in self._events({0: answering.request}):
            answering.push(event, seconds)
        return answering.answer()

    def compare(self, spec: Spec, answer: Answer, full: Answer) -> Comparison:
        """As every engine's. `kl` is `coarse_kl`, over the likely tokens of full recompute."""
        prompt = self._prepare(spec, None)
        return compare_answers(answer, full, self.first_token(prompt.layout.tokens.tolist(), prompt.params))

    def answer_all(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Answer | PicError]]:
        """Answer specs side by side, in one batch of vLLM's. `decode_s` of an answer is that beside the others."""
        answering: dict[int, _Answering] = {}
        for index, spec in enumerate(specs):
            try:
                self.require_supported(spec)
                answering[index] = self._answering(spec)
            except PicError as error:
                yield index, error
        for index, event, seconds in self._events({index: each.request for index, each in answering.items()}):
            answering[index].push(event, seconds)
            if isinstance(event, StreamEnd):
                yield index, outcome_of(answering[index].answer)

    def first_token(self, tokens: Sequence[int], params: Mapping[str, Any] | None) -> tuple[float, bool]:
        """A prompt's first token, linked, against that of full recompute: `coarse_kl`, and whether both are the same.

        Raises:
            InputError: it was not linked as the parameters say.
        """
        likely, _ = self._first(tokens, completion_params(self.model, Sampling(), 1, None, LIKELY))
        completion = completion_params(self.model, Sampling(), 1, params, LIKELY)
        completion.fields["logprob_token_ids"] = list(likely)
        linked, report = self._first(tokens, completion)
        if params is not None and (report or {}).get("state") not in ("linked", "cached"):
            raise InputError(f"a prompt was not linked ({(report or {}).get('problem')})")
        return coarse_kl(likely, linked), max(likely, key=likely.__getitem__) == max(linked, key=linked.__getitem__)

    def stop(self) -> None:
        """End what it does, from another thread: it raises `EngineStopped`."""
        self._is_stopped, sending = True, self._sending
        if sending is not None:
            sending.cancel()

    def _first(
        self, tokens: Sequence[int], params: CompletionParams
    ) -> tuple[Mapping[int, float], Mapping[str, Any] | None]:
        """The log-probabilities at the first token of an answer, if it has any, and the connector's report."""
        rows, report = list[Mapping[int, float]](), None
        for _, event, _ in self._events({0: (tokens, params, self.model.salt)}):
            if isinstance(event, StreamEnd):
                report = event.report
            else:
                rows += event.logprobs
        return rows[0] if rows else {}, report

    def _answering(
        self, spec: Spec, on_text: Callable[[str], None] | None = None, on_compile: OnCompile | None = None
    ) -> _Answering:
        spec = replace(spec, policy=spec.policy.without_attention)
        prompt = self._prepare(spec, on_compile)
        params = completion_params(self.model, spec.sampling, spec.max_new_tokens, prompt.params, 0)
        salt = secrets.token_hex(16) if spec.is_fresh and prompt.params is None else self.model.salt
        return _Answering(self.model, spec, prompt, (prompt.layout.tokens.tolist(), params, salt), on_text)

    def _prepare(self, spec: Spec, on_compile: OnCompile | None) -> PreparedPrompt:
        """Resolve and lay out a prompt, and have its objects in the store.

        Raises:
            PicError: an unusable document, or a prompt that is too long.
        """
        with ExitStack() as opened:
            prompt = lay_out_spec(self.model, self.store, spec, opened)
            parts, layout = prompt.parts[1:], prompt.layout
            if layout.num_tokens >= self._replicas.context_length:
                raise InputError(
                    f"the prompt has {layout.num_tokens} tokens, but the server has {self._replicas.context_length} "
                    "positions"
                )
            if spec.policy.needs.objects and parts:
                self._store_objects(prompt.objects, on_compile)
            names = [(part.chunk.source, part.key(self.model)) for part in parts if not part.is_separator]
            params = link_params(self.model, parts, layout, spec.policy)
            if params is not None and spec.is_fresh:
                params[FIELD]["fresh"] = True
            return PreparedPrompt(layout, params, names)

    def _store_objects(self, parts: Sequence[Part], on_compile: OnCompile | None) -> None:
        """Have every part's object in the store: compile it, or copy it if it was given as a file of its own."""
        for part in parts:
            target = self.store.path(part.key(self.model))
            if part.file is None:
                for done in self.compile([part.chunk], part.options):
                    if done.is_new and on_compile is not None:
                        on_compile(done)
            elif part.file.path.resolve() != target.resolve():
                with open(open_regular(part.file.path), "rb") as file:
                    self.store.insert(part.file.meta.key, file)

    def _compile(self, chunk: Chunk, options: CompileOptions) -> None:
        (before,) = contexts_of(self.model, chunk, options) or ((),)
        tokens = [*before, *chunk.tokens, chunk.tokens[-1]]
        if len(tokens) >= self._replicas.context_length:
            raise InputError(f"{chunk.source}: {len(tokens)} tokens, too long for this engine; cut it (--chunk-tokens)")
        proof = compile_proof(chunk.text, before, self.model.salt)
        params = {"compile": {"text": chunk.text, "before": len(before), "proof": proof, "later": self._is_later}}
        _, report = self._first(tokens, completion_params(self.model, Sampling(), 1, {FIELD: params}, None))
        if report is None or report["state"] != "compiled":
            raise InputError(f"{chunk.source}: cannot be compiled ({(report or {}).get('problem')})")

    def _events(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, Event, float]]:
        """What servers answer to requests, by their names, and seconds since each was sent; of each the last ends it.

        Raises:
            EngineStopped: see `stop`. ApiError: an error of one of them, which ends the others.
        """
        events: queue.SimpleQueue[tuple[int, Event, float] | None] = queue.SimpleQueue()
        sending = asyncio.run_coroutine_threadsafe(self._send_all(requests, events.put), self._loop)
        sending.add_done_callback(lambda _: events.put(None))
        self._sending = sending
        try:
            while not self._is_stopped and (event := events.get()) is not None:
                yield event
            if self._is_stopped:
                raise EngineStopped
            sending.result()
        finally:
            sending.cancel()

    async def _send_all(self, requests: Mapping[int, Request], put: Callable[[tuple[int, Event, float]], None]) -> None:
        async def send(name: int, tokens: Sequence[int], params: CompletionParams, salt: str) -> None:
            async with self._place():
                started = time.perf_counter()
                async with aclosing(self._replicas.complete(tokens, params, salt)) as events:
                    async for event in events:
                        put((name, event, time.perf_counter() - started))

        try:
            async with asyncio.TaskGroup() as group:
                for name, request in requests.items():
                    group.create_task(send(name, *request))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors


class _Answering:
    """One request, and the answer that grows."""

    def __init__(
        self, model: Model, spec: Spec, prompt: PreparedPrompt, request: Request, on_text: Callable[[str], None] | None
    ) -> None:
        from pictool.runtime.decode import TextStream

        self._model, self._policy, self._prompt, self.request = model, spec.policy, prompt, request
        self._show = on_text or (lambda _: None)
        self._stream = TextStream(model.tokenizer, spec.sampling.stop)
        self._tokens, self._logprobs = list[int](), list[float]()
        self._report: Mapping[str, Any] | None = None
        self._ttft_s = self._seconds = 0.0
        self._is_complete = True

    def push(self, event: Event, seconds: float) -> None:
        """Go on with what a server sent, so many seconds after it was asked."""
        self._seconds = seconds
        if isinstance(event, StreamEnd):
            self._report = event.report
            return
        self._ttft_s = self._ttft_s or seconds
        self._is_complete = event.finish_reason != "length"
        for token, row in zip(event.tokens, event.logprobs, strict=True):
            self._tokens.append(token)
            self._logprobs.append(row[token])
            self._show(self._stream.push(token))

    def answer(self) -> Answer:
        """The answer, after the last event. Raises InputError: it was not linked; says what is wrong with an object."""
        from pictool.linker.link import Timing
        from pictool.runtime.decode import Generated

        self._show(self._stream.finish())
        generated = Generated(self._stream.text, tuple(self._tokens), tuple(self._logprobs), self._is_complete)
        layout, report = self._prompt.layout, self._report
        recomputed, load_s, select_s = float(layout.num_context), 0.0, 0.0
        if report is not None:
            if report["problem"] is not None:
                raise InputError(str(report["problem"]))
            recomputed, measured = float(report["recomputed"] or 0), report["timing"]
            load_s, select_s = measured.get("load_s", 0.0), measured.get("select_s", 0.0)
        timing = Timing(load_s, select_s, self._ttft_s - load_s - select_s, self._ttft_s, fetch_s=load_s)
        link = LinkResult(self._policy, layout, recomputed, timing, 0, None, objects=self._prompt.objects)
        return Answer(generated, link, max(0.0, self._seconds - self._ttft_s), self._model, UpstreamEngine.name)


def link_params(model: Model, parts: Sequence[Part], layout: Layout, policy: Policy) -> dict[str, Any] | None:
    """The `kv_transfer_params` that link a prompt; None if there is nothing to link."""
    if not policy.needs.objects or not parts:
        return None
    spans = zip(parts, layout.chunks, strict=True)
    chunks = [{"key": part.key(model), "start": start} for part, (start, _) in spans if not part.is_separator]
    return {FIELD: {"chunks": chunks, "policy": {"algo": policy.name, **policy.params}}}


def completion_params(
    model: Model, sampling: Sampling, count: int, params: Mapping[str, Any] | None, num_logprobs: int | None,
    answer_format: AnswerFormat = AnswerFormat(), n: int = 1,
) -> CompletionParams:  # fmt: skip
    """The fields of a completion. All that a model's directory may set otherwise on a server is said.

    Args:
        params: `kv_transfer_params`; None: an exact request.
        num_logprobs: likely tokens that each token has beside its own log-probability; None: it has none.
    """
    fields: dict[str, Any] = {
        "max_tokens": count, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "seed": sampling.seed % (1 << 63), "stop": list(sampling.stop),
        "stop_token_ids": sorted(model.eos_ids), "logprobs": num_logprobs, "n": n,
        "frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "skip_special_tokens": not answer_format.keeps_special,
    }  # fmt: skip
    if answer_format.schema is not None:
        fields["structured_outputs"] = {"json": answer_format.schema, "disable_any_whitespace": True}
    return CompletionParams(fields, dict(params or {FIELD: False}))


def coarse_kl(full: Mapping[int, float], linked: Mapping[int, float]) -> float:
    """KL(full ‖ linked) in nats over the tokens of `full`, and all others as one: at most that over the vocabulary.

    Args:
        full, linked: log-probabilities by token; `linked` has all tokens of `full`.
    """
    p = [math.exp(value) for value in full.values()]
    q = [math.exp(linked[token]) for token in full]
    p, q = [*p, max(0.0, 1 - sum(p))], [*q, max(1e-12, 1 - sum(q))]
    return max(0.0, sum(a * math.log(a / max(b, 1e-300)) for a, b in zip(p, q, strict=True) if a > 1e-12))
