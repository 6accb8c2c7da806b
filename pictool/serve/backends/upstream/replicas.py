"""The servers that a router fronts, over HTTP: prompts of token ids, streams of answers, and the connector's reports.

vLLM's streams have no `kv_transfer_params`. So each link has a name, by which its report is asked for while the answer
comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from pictool.engines.vllm.request import FIELD
from pictool.errors import InputError
from pictool.routing import Residency
from pictool.serve.errors import ApiError
from pictool.urls import without_credentials

_LEFT_OUT_S = 5.0  # for which a server that failed gets no request, if another has room
_TIMEOUT = httpx.Timeout(600, connect=5)
_BEGINNING = 64  # tokens of a prompt without objects, by which it finds the server that had it
_PLACEHOLDER = "token_id:"  # what vLLM calls a token if its id is asked for
_CLIENTS_MISTAKES = (400, 413, 422)
_log = logging.getLogger("pictool.serve")


@dataclass(frozen=True)
class Delta:
    """More of answer `index`. `logprobs` are by token id, of each of `tokens`."""

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class StreamEnd:
    """All is answered. `report` is the connector's, None of an exact request; `num_cached` tokens were not computed."""

    report: Mapping[str, Any] | None
    num_cached: int | None


@dataclass
class CompletionParams:
    """The fields of a completion apart from its prompt; `transfer` is its `kv_transfer_params`."""

    fields: dict[str, Any]
    transfer: dict[str, Any]


@dataclass
class _Replica:
    """One server. `resumes` is when it gets requests again, by time.monotonic."""

    url: str
    num_active: int = 0
    resumes: float = 0.0


class _BrokenError(Exception):
    """A server fails a request that another one may answer."""


class Replicas:
    """Servers of one model. A request goes to one that has its objects, unless its queue is too long (`routing.rank`).

    Attributes:
        model: their name of it. context_length: the positions that all have.
    """

    def __init__(self, urls: Sequence[str], key: str | None = None) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._replicas = {url: _Replica(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)}
        self._residency = Residency()
        self._residency.keep(self._replicas)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.model, self.context_length = "", 0

    async def start(self) -> None:
        """Learn what the servers serve.

        Raises:
            InputError: one that runs no PicConnector, or another model; or none answers.
        """
        found, failed = dict[str, tuple[str, int]](), dict[str, Exception]()
        for url in self._replicas:
            try:
                response = await self._http().get(f"{url}/v1/models", timeout=30)
                served = response.raise_for_status().json()["data"][0]
                found[url] = str(served["id"]), int(served["max_model_len"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                failed[url] = error
        if not found:
            raise InputError(f"--upstream {self._shown()}: no server answers; start vllm serve, or see its log")
        if len(set(found.values())) > 1:
            raise InputError(
                f"--upstream {self._shown()}: all must serve the same model, under the same name and --max-model-len"
            )
        for url, reason in failed.items():
            self._fail(self._replicas[url], reason)
        self.model, self.context_length = next(iter(found.values()))
        for url in found:
            if (await self._report(url, "probe"))["state"] != "unknown":
                raise InputError(
                    f"--upstream {without_credentials(url)}: does not run this version of PicConnector; see "
                    "docs/guides/vllm.md"
                )

    async def disconnect(self) -> None:
        """Close the connections of the event loop that runs, which ends."""
        await self._http().aclose()
        self._loop = None

    async def live(self) -> bool:
        """Whether any server lives."""

        async def lives(url: str) -> bool:
            with suppress(httpx.HTTPError):
                return (await self._http().get(f"{url}/health", timeout=10)).status_code == 200
            return False

        return any(await asyncio.gather(*map(lives, self._replicas)))

    async def complete(
        self, tokens: Sequence[int], params: CompletionParams, salt: str, keys: Mapping[str, int] = {}
    ) -> AsyncGenerator[Delta | StreamEnd, None]:
        """Answer a prompt. Who reads no further ends it on its server.

        Args:
            keys: bytes of its objects, in the order of the prompt; without any, its beginning finds who had that.

        Raises:
            ApiError: a server refuses it, or none can answer.
        """
        body, name = self._body(tokens, params, salt)
        keys = keys or {hashlib.sha256(json.dumps([salt, list(tokens[:_BEGINNING])]).encode()).hexdigest(): 0}
        for url in self._order(keys):
            replica, has_begun = self._replicas[url], False
            replica.num_active += 1
            try:
                async with aclosing(self._events(url, body, name)) as events:
                    async for event in events:
                        if not has_begun:
                            self._residency.was_sent(keys, url)
                            replica.resumes = 0.0
                        has_begun = True
                        yield event
                return
            except (httpx.HTTPError, _BrokenError) as error:
                self._fail(replica, error)
                if has_begun:
                    raise ApiError(
                        503, "the server that was answering was lost; try again", code="upstream_lost"
                    ) from error
            finally:
                replica.num_active -= 1
        raise ApiError(503, "no upstream server answers; try again", code="no_upstream")

    def _http(self) -> httpx.AsyncClient:
        """The client of the event loop that runs: the start has one of its own."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=_TIMEOUT, limits=limits, trust_env=False)
            self._loop = loop
        return self._client

    def _body(self, tokens: Sequence[int], params: CompletionParams, salt: str) -> tuple[dict[str, Any], str]:
        """The body of a request, and the name of its report; no name: it has none.

        vLLM takes few salts in `cache_salt`. So that has a hash, which keeps its own cache apart by tenant.
        """
        pic, name = params.transfer[FIELD], ""
        if pic is not False:
            name = secrets.token_hex(16)
            pic = {**pic, "salt": salt, "report_as": name}
        salted = {"cache_salt": hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()} if salt else {}
        return {
            "model": self.model, "prompt": list(tokens), "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, "return_tokens_as_token_ids": True, **params.fields, **salted,
            "kv_transfer_params": {FIELD: pic},
        }, name  # fmt: skip

    async def _events(self, url: str, body: Mapping[str, Any], name: str) -> AsyncGenerator[Delta | StreamEnd, None]:
        """What one server answers. Raises `_BrokenError`, httpx's errors, and ApiError for a client's mistake."""
        reporting: asyncio.Task[Mapping[str, Any]] | None = None
        num_cached = None
        try:
            async with aclosing(self._chunks(url, body)) as chunks:
                async for chunk in chunks:
                    if name and reporting is None:
                        reporting = asyncio.create_task(self._report(url, name))
                    for choice in chunk["choices"]:
                        yield _delta(choice)
                    usage = chunk.get("usage") or {}
                    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", num_cached)
            yield StreamEnd(None if reporting is None else await reporting, num_cached)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _BrokenError(f"no answer from vLLM ({type(error).__name__})") from error
        finally:
            if reporting is not None:
                reporting.cancel()

    async def _chunks(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        content = json.dumps(body).encode()  # in ASCII: a stop string may have half of a surrogate pair
        headers = {"Content-Type": "application/json"}
        request = self._http().stream("POST", f"{url}/v1/completions", content=content, headers=headers)
        async with request as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise _refusal(int(chunk["error"]["code"]), line.removeprefix("data: ").encode())
                    yield chunk
        raise _BrokenError("a stream ended early")

    async def _report(self, url: str, name: str) -> Mapping[str, Any]:
        """The connector's report of a request by its name."""
        body = {
            "model": self.model, "prompt": [0], "max_tokens": 1, "temperature": 0,
            "kv_transfer_params": {FIELD: {"report": name}},
        }  # fmt: skip
        try:
            response = await self._http().post(f"{url}/v1/completions", json=body)
            report = (response.raise_for_status().json().get("kv_transfer_params") or {}).get(FIELD)
            return {"state": "none"} if report is None else dict(report)
        except (httpx.HTTPError, ValueError, AttributeError, TypeError) as error:
            _log.warning("pic: %s has no report of a request: %s", without_credentials(url), error)
            return {"state": "lost"}

    def _order(self, keys: Mapping[str, int]) -> list[str]:
        """The servers, the best for a request first, and those that were left out last."""
        now = time.monotonic()
        usable = {url: float(replica.num_active) for url, replica in self._replicas.items() if replica.resumes <= now}
        return [*self._residency.order(keys, usable), *(url for url in self._replicas if url not in usable)]

    def _fail(self, replica: _Replica, error: Exception) -> None:
        """Leave a server out for a while: what it had may be lost."""
        replica.resumes = time.monotonic() + _LEFT_OUT_S
        self._residency.forget(replica.url)
        word = str(error) or type(error).__name__
        _log.warning("pic: %s is not used for %g s: %s", without_credentials(replica.url), _LEFT_OUT_S, word)

    def _shown(self) -> str:
        return " ".join(map(without_credentials, self._replicas))


def _delta(choice: Mapping[str, Any]) -> Delta:
    """A choice of a chunk. Raises LookupError or ValueError: it is none."""
    tokens, found = choice.get("token_ids") or [], choice.get("logprobs") or {}
    rows = [
        {int(name.removeprefix(_PLACEHOLDER)): float(value) for name, value in (top or {}).items()}
        | {token: float(own)}
        for token, top, own in zip(
            tokens, found.get("top_logprobs") or (), found.get("token_logprobs") or (), strict=bool(found)
        )
    ]
    return Delta(
        int(choice["index"]), choice["text"], tokens, rows, choice.get("finish_reason"), choice.get("stop_reason")
    )


def _refusal(status: int, body: bytes) -> Exception:
    """The error of a response: the client's, if it is the client's mistake."""
    message = body.decode(errors="replace")[:1000]
    with suppress(ValueError, LookupError, TypeError):
        message = str(json.loads(body)["error"]["message"])
    if status not in _CLIENTS_MISTAKES:
        return _BrokenError(f"HTTP {status}: {message}")
    return ApiError(status, message, code="context_length_exceeded" if "context length" in message else None)
