"""vLLM's own serving objects, for the router inside its server: requests are handed on to them, and heard.

`Serving` calls the functions behind vLLM's routes, with its parsers, sampling and streams. What the engine says of a
request (the connector's report, counts of tokens) is not in all of vLLM's responses; so its serving objects get an
engine client that lets a `RequestTap` listen.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from pictool.core import AnswerFormat, Sampling, Target
from pictool.engines.vllm.client.online import LIKELY, OnlineEngine, coarse_kl, generate, prompt_of
from pictool.engines.vllm.client.setup import ConnectorSettings, load_target_model, parse_settings, require_uncoded
from pictool.engines.vllm.request import FIELD
from pictool.errors import InputError
from pictool.runtime.model import Model
from pictool.store.store import Store

_TRANSFER = "kv_transfer_params"
_tap: ContextVar[RequestTap | None] = ContextVar("pic_request_tap", default=None)


class RefusedError(Exception):
    """vLLM refuses a request: its status, and its own body."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(str(body))
        self.status, self.body = status, dict(body)

    @property
    def message(self) -> str:
        return str(self.body.get("error", {}).get("message", self))

    @classmethod
    def of(cls, error: Exception) -> RefusedError | None:
        """An error of vLLM's that is the client's mistake; None: it is none."""
        from pydantic import ValidationError
        from vllm.exceptions import VLLMClientError, VLLMNotFoundError, VLLMUnprocessableEntityError

        if isinstance(error, RefusedError):
            return error
        if not isinstance(error, VLLMClientError | ValidationError):
            return None
        statuses = {VLLMNotFoundError: 404, VLLMUnprocessableEntityError: 422}
        status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 400)
        return cls(status, {"error": {"message": str(error), "type": "invalid_request_error", "code": status}})


@dataclass
class PromptRecord:
    """What the engine said of one prompt. `report` is the connector's, None of an ordinary request."""

    prompt: Any
    params: Any
    num_prompt: int = 0
    num_cached: int = 0
    report: Mapping[str, Any] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by the answer's index
    texts: dict[int, str] = field(default_factory=dict)

    def add(self, output: Any) -> None:
        """Take an output of vLLM's over: the whole answer, or what is new."""
        self.num_prompt = self.num_prompt or len(output.prompt_token_ids or ())
        self.num_cached = max(self.num_cached, output.num_cached_tokens or 0)
        report = (output.kv_transfer_params or {}).get(FIELD)
        self.report = self.report or report  # of several answers, the first that had to be linked
        for part in output.outputs:
            self.tokens.setdefault(part.index, []).extend(part.token_ids)
            self.texts[part.index] = self.texts.get(part.index, "") + part.text


class RequestTap:
    """Listens to what the engine says of the prompts of one HTTP request. A context manager around its handling."""

    def __init__(self) -> None:
        self.prompts: list[PromptRecord] = []
        self.first_s: float | None = None  # when the first token came, by time.perf_counter

    def __enter__(self) -> RequestTap:
        self._token = _tap.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _tap.reset(self._token)

    async def listen(self, outputs: AsyncGenerator[Any, None], prompt: Any, params: Any) -> AsyncGenerator[Any, None]:
        heard = PromptRecord(prompt, params)
        self.prompts.append(heard)
        try:
            async for output in outputs:
                self.first_s = self.first_s or time.perf_counter()
                heard.add(output)
                yield output
        finally:
            await outputs.aclose()


class _HeardClient:
    """vLLM's engine client, which lets a `RequestTap` listen."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **options: Any) -> Any:
        outputs = self._client.generate(prompt, sampling_params, *args, **options)
        tap = _tap.get()
        return outputs if tap is None else tap.listen(outputs, prompt, sampling_params)


class Serving:
    """The serving objects of a running server.

    Args:
        client: its engine client. state: that of its application, whose chat and completion handlers are made to be
            heard.

    Raises:
        InputError: options of vLLM's by which answers cannot be compared with full recompute.
    """

    def __init__(self, client: Any, state: Any) -> None:
        self.client, config = client, client.vllm_config
        model = client.model_config
        if 0 <= model.max_logprobs < LIKELY or model.logprobs_mode != "raw_logprobs":
            raise InputError(f"--max-logprobs, --logprobs-mode: the router needs {LIKELY} raw log-probabilities")
        require_uncoded(config)
        self.settings: ConnectorSettings = parse_settings(config.kv_transfer_config.kv_connector_extra_config)
        self.names: list[str] = [path.name for path in state.openai_serving_models.base_model_paths]
        self.model: Model = load_target_model(config, self.settings)
        self.model.name = self.names[0]  # as clients know it, in what they are told
        self.max_model_len: int = client.model_config.max_model_len
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        for name in ("openai_serving_chat", "openai_serving_completion"):
            handler = copy(getattr(state, name))
            handler.engine_client = _HeardClient(client)
            setattr(state, name, handler)
        self._chat = state.openai_serving_chat

    @property
    def target(self) -> Target:
        return self.model.target

    async def check_health(self) -> bool:
        """Whether the engine lives."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self.client.check_health()
        except EngineDeadError:
            return False
        return True

    def close(self) -> None:
        """End the engine, if no server of vLLM's does: what it computes is lost."""
        self.client.shutdown(0)

    async def render(self, body: Mapping[str, Any]) -> str:
        """The text of a chat by vLLM's template.

        Raises:
            Refused: vLLM does not take the messages, or its template gives token ids.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        result = await self._chat.render_chat_request(ChatCompletionRequest.model_validate(dict(body)))
        if isinstance(result, ErrorResponse):
            raise RefusedError(int(result.error.code), result.model_dump())
        text = result[1][0].get("prompt")
        if not isinstance(text, str):
            message = "this model's chats are laid out as tokens, so that no document can be named in them"
            raise RefusedError(400, {"error": {"message": message, "type": "invalid_request_error", "code": 400}})
        return text

    async def chat(self, body: Mapping[str, Any], raw_request: Any, salt: str) -> Any:
        """The response of vLLM's own route, under a salt; empty: that of the body.

        vLLM takes no salt with a slash in a body. The connector takes any: it makes its own of it.

        Raises pydantic's ValidationError, and what vLLM's handlers know.
        """
        from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return await create_chat_completion(_salted(ChatCompletionRequest, body, salt), raw_request)

    async def complete(self, body: Mapping[str, Any], raw_request: Any, salt: str) -> Any:
        """The response of vLLM's own route. Raises as `chat`."""
        from vllm.entrypoints.openai.completion.api_router import create_completion
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return await create_completion(_salted(CompletionRequest, body, salt), raw_request)

    def generate(
        self, engine: OnlineEngine, tokens: Sequence[int], sampling: Sampling, max_tokens: int, n: int,
        params: Mapping[str, Any], tap: RequestTap, num_logprobs: int | None = None,
        answer_format: AnswerFormat = AnswerFormat(),
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        """The outputs of a prompt of token ids, each with what is new, heard.

        Args:
            num_logprobs: likely tokens that each token has beside its own log-probability; None: it has none.
        """
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        chosen = engine._sampling_params(sampling, max_tokens, params, num_logprobs)
        chosen.n, chosen.output_kind = n, RequestOutputKind.DELTA
        chosen.skip_special_tokens = not answer_format.keeps_special
        if answer_format.schema is not None:
            chosen.structured_outputs = StructuredOutputsParams(json=answer_format.schema, disable_any_whitespace=True)
        salt = engine.model.salt
        return tap.listen(generate(self.client, tokens, chosen, salt), prompt_of(tokens, salt), chosen)

    async def verify(self, heard: PromptRecord) -> dict[str, Any]:
        """The first answer against full recompute of the same prompt, with the same sampling.

        `kl` is over the likeliest tokens (`coarse_kl`).
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        transfer = (heard.params.extra_args or {}).get(_TRANSFER)
        exactly = heard.params.clone()
        exactly.extra_args = (exactly.extra_args or {}) | {_TRANSFER: {FIELD: False}}
        exactly.n, exactly.output_kind, exactly.logprobs = 1, RequestOutputKind.FINAL_ONLY, LIKELY
        full = await self._last(heard.prompt, exactly)
        first_of_full = _likely(full)
        first = SamplingParams(
            max_tokens=1, temperature=0, logprobs=len(first_of_full), logprob_token_ids=list(first_of_full),
            extra_args={_TRANSFER: transfer}, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        (entries,) = (await self._last(heard.prompt, first)).outputs[0].logprobs
        first_of_linked = {token: entry.logprob for token, entry in entries.items()}
        texts = heard.texts.get(0, "").strip(), full.outputs[0].text.strip()
        same = [a == b for a, b in zip(heard.tokens.get(0, []), full.outputs[0].token_ids, strict=False)]
        return {
            "answer": texts[1], "kl": coarse_kl(first_of_full, first_of_linked), "answer_kl": None,
            "same_answer": texts[0] == texts[1],
            "same_first_token": max(first_of_full, key=first_of_full.__getitem__)
            == max(first_of_linked, key=first_of_linked.__getitem__),
            "common_prefix": [*same, False].index(False),
        }  # fmt: skip

    async def _last(self, prompt: Any, params: Any) -> Any:
        """The whole output of a prompt."""
        async for output in self.client.generate(prompt, params, f"pic-{secrets.token_hex(12)}"):
            last = output
        return last

    @property
    def template(self) -> str:
        """Its chat template; empty if it has none."""
        return str(self._chat.chat_template or self.model.tokenizer.chat_template or "")

    def open_store(self) -> Store:
        """The store of the connector's settings, opened in this process."""
        return self.settings.open_store()


def _salted(kind: Any, body: Mapping[str, Any], salt: str) -> Any:
    """A body as a request of vLLM's kind, under a salt; empty: that of the body."""
    request = kind.model_validate(dict(body))
    request.cache_salt = salt or request.cache_salt
    return request


def _likely(output: Any) -> dict[int, float]:
    """The log-probabilities of the likeliest tokens at an output's first. vLLM adds the one that was sampled."""
    entries = output.outputs[0].logprobs[0].items()
    return {token: entry.logprob for token, entry in entries if entry.rank <= LIKELY}
