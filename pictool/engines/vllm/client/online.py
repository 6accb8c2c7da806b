"""The engine over a vLLM that serves: the same requests as offline, sent from other threads to its event loop."""

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

from pictool.compiler.compile import Compiled
from pictool.core import Sampling
from pictool.engines.base import Answer, compare_answers
from pictool.engines.vllm.client.offline import PreparedPrompt, VllmEngine
from pictool.engines.vllm.plugin import router_secret
from pictool.engines.vllm.request import FIELD
from pictool.errors import InputError
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.resolve import OnCompile
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.store.store import Store

_EXACTLY = {FIELD: False}  # also where the server recognises documents in what says nothing
LIKELY = 20  # tokens that two answers are compared over: as many as vLLM gives without an option


class EngineStopped(Exception):
    """An engine was stopped, since nobody waits for what it does."""


class OnlineEngine(VllmEngine):
    """Compiles and answers on the engine client of a running server. Its methods wait: call them in a thread.

    Args:
        client: vLLM's `EngineClient`; `loop` is the event loop that it runs in.
        later: nobody waits for what it compiles, so that all other work of vLLM's comes first.
        fresh: vLLM's own cache gives nothing of its prompts, so that times and counts are those of a first request.
        place: each request is sent within one, entered on the loop: what lets it wait for its turn.
    """

    def __init__(
        self, model: Model, store: Store, client: Any, loop: asyncio.AbstractEventLoop, *, later: bool = False,
        fresh: bool = False, place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        super().__init__(model, store, max_model_len=client.model_config.max_model_len)
        self._client, self._loop, self._is_later, self._is_fresh = client, loop, later, fresh
        self._place = place
        self._sending: Future[None] | None = None
        self._is_stopped = False
        self.compiled: list[Path] = []  # objects that it made

    def compile(self, *args: Any, **options: Any) -> list[Compiled]:
        done = super().compile(*args, **options)
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
        params = self._sampling_params(Sampling(), 1, prompt.params, LIKELY)
        params.logprob_token_ids = list(likely)
        *_, linked = self._steps(prompt.layout.tokens.tolist(), params)
        report = (linked.kv_transfer_params or {}).get(FIELD) or {}
        if prompt.params is not None and report.get("state") not in ("linked", "cached"):
            raise InputError(f"a prompt was not linked ({report.get('problem')})")
        return likely, {token: entry.logprob for token, entry in linked.outputs[0].logprobs[0].items()}

    def close(self) -> None:
        """Nothing: the server has the engine."""

    def _start(self, length: int) -> None:
        """It runs already. A prompt that is too long for it is refused by vLLM."""

    def _prepare(self, spec: Spec, on_compile: OnCompile | None) -> PreparedPrompt:
        prompt, most = super()._prepare(spec, on_compile), self._client.model_config.max_model_len
        if prompt.layout.num_tokens >= most:
            raise InputError(f"the prompt has {prompt.layout.num_tokens} tokens, and the server {most} positions")
        if not self._is_fresh or prompt.params is None:
            return prompt
        return replace(prompt, params={FIELD: prompt.params[FIELD] | {"fresh": True}})

    def _sampling_params(
        self, sampling: Sampling, count: int, params: Mapping[str, Any] | None, num_logprobs: int | None
    ) -> Any:
        return super()._sampling_params(sampling, count, params or _EXACTLY, num_logprobs)

    def _compile_params(self, text: str, sinks: int) -> dict[str, Any]:
        return {FIELD: {"compile": {"text": text, "sinks": sinks, "secret": router_secret(), "later": self._is_later}}}

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

        async def send(name: int, tokens: Sequence[int], params: Any) -> None:
            is_exact = params.extra_args["kv_transfer_params"] == _EXACTLY
            salt = secrets.token_hex(16) if is_exact and self._is_fresh else self.model.salt
            async with self._place():
                async for output in generate(self._client, tokens, params, salt):
                    put((name, output))

        try:
            async with asyncio.TaskGroup() as group:
                for name, request in requests.items():
                    group.create_task(send(name, *request))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors


def generate(client: Any, tokens: Sequence[int], params: Any, salt: str) -> Any:
    """The outputs of a prompt of token ids, under a tenant's salt."""
    return client.generate(prompt_of(tokens, salt), params, f"pic-{secrets.token_hex(12)}")


def prompt_of(tokens: Sequence[int], salt: str) -> dict[str, Any]:
    """A prompt of token ids as vLLM takes it."""
    return {"prompt_token_ids": list(tokens)} | ({"cache_salt": salt} if salt else {})


def coarse_kl(full: Mapping[int, float], linked: Mapping[int, float]) -> float:
    """KL(full ‖ linked) in nats over the tokens of `full`, and all others as one: at most that over the vocabulary.

    Args:
        full, linked: log-probabilities by token; `linked` has all tokens of `full`.
    """
    p = [math.exp(value) for value in full.values()]
    q = [math.exp(linked[token]) for token in full]
    p, q = [*p, max(0.0, 1 - sum(p))], [*q, max(1e-12, 1 - sum(q))]
    return max(0.0, sum(a * math.log(a / max(b, 1e-300)) for a, b in zip(p, q, strict=True) if a > 1e-12))
