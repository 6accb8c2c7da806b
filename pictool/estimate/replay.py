"""Replay: requests of a log are sent to a running `pic serve`, whose report of each is compared with a prediction."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pictool.errors import InputError
from pictool.estimate.measure import Tokenize
from pictool.estimate.segments import LoggedPrompt
from pictool.reading import parse_json
from pictool.urls import open_url, without_credentials

_TIMEOUT_S = 600.0
_MAX_ANSWER = 16 << 20


@dataclass(frozen=True)
class Compared:
    """A request, and tokens of its documents: as predicted, and as the server reused or computed them again.

    Fields:
        again: of those, tokens of documents that the log had before.
        prompt: tokens of the whole prompt.
    """

    number: int
    predicted: int
    reported: int
    again: int
    prompt: int


@dataclass(frozen=True)
class ReplayServer:
    """A running `pic serve`."""

    url: str
    key: str | None = None

    def model(self) -> str:
        """The name of its model."""
        listed = self._request("/v1/models", None)
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise InputError(f"{self.shown}: names no model; is it a pic serve?") from error

    @property
    def shown(self) -> str:
        return without_credentials(self.url)

    def answer(self, body: Mapping[str, Any]) -> Any:
        """The response to a request for one token, in which only documents that are given as such are linked."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return self._request(path, {**body, "max_tokens": 1, "temperature": 0, "pic": {"recognise": False}})

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        try:
            with open_url(request, _TIMEOUT_S) as response:
                return parse_json(response.read(_MAX_ANSWER))
        except urllib.error.HTTPError as error:
            raise InputError(f"{self.shown}{path}: {error.code}, {_reason(error)}") from error
        except urllib.error.URLError as error:
            raise InputError(f"{self.shown}: no server answers ({error.reason}); start one with pic serve") from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise InputError(f"{self.shown}: does not answer like pic serve ({error}); check the URL") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(parse_json(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError, http.client.HTTPException):
        return str(error.reason)


def replay(
    server: ReplayServer, prompts: Iterator[LoggedPrompt], tokenize: Tokenize, sample: int
) -> Iterator[Compared]:
    """Send the first requests of a log that have documents, and compare.

    A document that is given as one (`documents`, a part of type document, a marker) is linked in all its tokens, the
    first time too: `pic serve` compiles it then.

    Raises:
        InputError: the server refuses one, or none of the log has a document.
    """
    model, known, number = server.model(), set[str](), 0
    for prompt in prompts:
        texts = [str(segment.content) for segment in prompt.segments if segment.is_marked]
        if not texts or prompt.body is None:
            continue
        sizes = [len(tokenize(text)) for text in texts]
        again = sum(size for text, size in zip(texts, sizes, strict=True) if text in known)
        known.update(texts)
        number += 1
        response = server.answer({**prompt.body, "model": model})
        try:
            report, total = response["pic"], int(response["usage"]["prompt_tokens"])
            reported = int(report["linked_tokens"]) + int(report["recomputed_tokens"])
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(f"{server.shown}: does not report what it reused; is it a pic serve?") from error
        yield Compared(number, sum(sizes), reported, again, total)
        if number == sample:
            return
    if not number:
        raise InputError("--replay: no request of this log has documents that are given as such")
