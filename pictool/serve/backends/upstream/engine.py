"""The engine over servers elsewhere: what requests of `pic link`, span queries and compilations need of one."""

from __future__ import annotations

import asyncio
import math
import queue
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from pictool.compiler.compile import Compiled, OnCompile
from pictool.core import AnswerFormat, Sampling
from pictool.engines.base import Answer, compare_answers
from pictool.engines.vllm.client.offline import PreparedPrompt, VllmEngine
from pictool.engines.vllm.request import FIELD, compile_proof
from pictool.errors import InputError
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.serve.backends.upstream.replicas import CompletionParams, Replicas
from pictool.store.store import Store

_EXACTLY = {FIELD: False}  # also where a server recognises documents in what says nothing
LIKELY = 20  # tokens that two answers are compared over: as many as vLLM gives without an option


class EngineStopped(Exception):
    """An engine was stopped, since nobody waits for what it does."""


class UpstreamEngine(VllmEngine):
    """Compiles and answers by requests to servers. Its methods wait: call them in a thread.

    Args:
        loop: the event loop that `replicas` are used in.
        later: nobody waits for what it compiles, so that all other work of vLLM's comes first.
        fresh: vLLM's own cache gives nothing of its prompts, so that times and counts are those of a first request.
        place: each request is sent within one, entered on the loop: what lets it wait for its turn.
    """

    def __init__(
        self, model: Model, store: Store, replicas: Replicas, loop: asyncio.AbstractEventLoop, *, later: bool = False,
        fresh: bool = False, place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        super().__init__(model, store, max_model_len=replicas.context_length)
        self._replicas, self._loop, self._is_later, self._is_fresh = replicas, loop, later, fresh
        self._place = place
        self._sending: Future[None] | None = None
        self._is_stopped = False
        self.compiled: list[Path] = []  # objects that it made

    def compile(self, *args: Any, **options: Any) -> list[Compiled]:
        done = super().compile(*args, **options)
        if lost := next((part for part in done if not self.store.has(part.key)), None):
            raise InputError(
                f"object {lost.key[:12]}: its server wrote it to another store; give both the same --store or --remote"
            )
        self.compiled += [part.path for part in done if part.is_new]
        return done

    def run(
        self, spec: Spec, *, on_text: Callable[[str], None] | None = None, on_compile: OnCompile | None = None,
        wants_logits: bool = False,
    ) -> Answer:  # fmt: skip
        return super().run(spec, on_text=on_text, on_compile=on_compile, wants_logits=False)

    def answer(self, spec: Spec, *, compare: bool = False, **options: Any) -> Answer:
        """As every engine's. `kl` of a comparison is `coarse_kl`, over the likely tokens of full recompute."""
        self.require_supported(spec)
        answer = self.run(spec, **options)
        if not compare:
            return answer
        full = self.run(replace(spec, policy=make_policy(BASELINE)))
        likely, linked = self._likely(spec)
        is_same = max(likely, key=likely.__getitem__) == max(linked, key=linked.__getitem__)
        return replace(answer, compare=compare_answers(answer, full, (coarse_kl(likely, linked), is_same)))

    def divergence(self, spec: Spec) -> float:
        """KL(full ‖ linked) in nats of a prompt's first token, as `coarse_kl` has it."""
        return coarse_kl(*self._likely(spec))

    def first_token(
        self, tokens: Sequence[int], params: Mapping[str, Any] | None, likely: Mapping[int, float]
    ) -> dict[int, float]:
        """The log-probabilities of the likely tokens at a prompt's first.

        Raises:
            InputError: it was not linked as the parameters say.
        """
        completion = self._sampling_params(Sampling(), 1, params, LIKELY)
        completion.fields["logprob_token_ids"] = list(likely)
        *_, last = self._steps(tokens, completion)
        report = last.kv_transfer_params[FIELD] or {}
        if params is not None and report.get("state") not in ("linked", "cached"):
            raise InputError(f"a prompt was not linked ({report.get('problem')})")
        return {token: entry.logprob for token, entry in last.outputs[0].logprobs[0].items()}

    def stop(self) -> None:
        """End what it does, from another thread: it raises `EngineStopped`."""
        self._is_stopped, sending = True, self._sending
        if sending is not None:
            sending.cancel()

    def _likely(self, spec: Spec) -> tuple[dict[int, float], dict[int, float]]:
        """Log-probabilities of a prompt's first token, under full recompute and linked: of its likely tokens there."""
        prompt = self._prepare(spec, None)
        full = self._first_token(prompt.layout, None, num_logprobs=LIKELY).outputs[0].logprobs[0]
        likely = {token: entry.logprob for token, entry in full.items()}
        return likely, self.first_token(prompt.layout.tokens.tolist(), prompt.params, likely)

    def close(self) -> None:
        """Nothing: the servers have the engine."""

    def _start(self, length: int) -> None:
        """They run already. A prompt that is too long for them is refused by vLLM."""

    def _prepare(self, spec: Spec, on_compile: OnCompile | None) -> PreparedPrompt:
        prompt, most = super()._prepare(spec, on_compile), self._replicas.context_length
        if prompt.layout.num_tokens >= most:
            raise InputError(f"the prompt has {prompt.layout.num_tokens} tokens, and the server {most} positions")
        if not self._is_fresh or prompt.params is None:
            return prompt
        return replace(prompt, params={FIELD: prompt.params[FIELD] | {"fresh": True}})

    def _sampling_params(
        self, sampling: Sampling, count: int, params: Mapping[str, Any] | None, num_logprobs: int | None
    ) -> CompletionParams:
        return completion_params(self.model, sampling, count, params, num_logprobs)

    def _compile_params(self, text: str, sinks: int) -> dict[str, Any]:
        proof = compile_proof(text, sinks, self.model.salt)
        return {FIELD: {"compile": {"text": text, "sinks": sinks, "proof": proof, "later": self._is_later}}}

    def _steps_together(self, requests: Mapping[int, tuple[Sequence[int], Any]]) -> Iterator[tuple[int, Any]]:
        outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        sending = asyncio.run_coroutine_threadsafe(self._send_all(requests, outputs.put), self._loop)
        sending.add_done_callback(lambda _: outputs.put(None))
        self._sending = sending
        try:
            while not self._is_stopped and (output := outputs.get()) is not None:
                yield output
            if self._is_stopped:
                raise EngineStopped
            sending.result()
        finally:
            sending.cancel()

    async def _send_all(self, requests: Mapping[int, tuple[Sequence[int], Any]], put: Callable[[Any], None]) -> None:
        """Send requests, and put their outputs with their names. An error of one ends the others."""

        async def send(name: int, tokens: Sequence[int], params: CompletionParams) -> None:
            is_fresh_exact = params.transfer == _EXACTLY and self._is_fresh
            salt = secrets.token_hex(16) if is_fresh_exact else self.model.salt
            async with self._place():
                async for output in self._replicas.outputs(tokens, params, salt):
                    put((name, output))

        try:
            async with asyncio.TaskGroup() as group:
                for name, request in requests.items():
                    group.create_task(send(name, *request))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors


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
    return CompletionParams(fields, dict(params or _EXACTLY))


def coarse_kl(full: Mapping[int, float], linked: Mapping[int, float]) -> float:
    """KL(full ‖ linked) in nats over the tokens of `full`, and all others as one: at most that over the vocabulary.

    Args:
        full, linked: log-probabilities by token; `linked` has all tokens of `full`.
    """
    p = [math.exp(value) for value in full.values()]
    q = [math.exp(linked[token]) for token in full]
    p, q = [*p, max(0.0, 1 - sum(p))], [*q, max(1e-12, 1 - sum(q))]
    return max(0.0, sum(a * math.log(a / max(b, 1e-300)) for a, b in zip(p, q, strict=True) if a > 1e-12))
