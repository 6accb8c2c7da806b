"""Replay: requests of a log are sent to a running `pic serve`, whose report of each is compared with a prediction."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from pictool.errors import InputError
from pictool.estimate.measure import Tokenize
from pictool.estimate.segments import LoggedPrompt, split_text
from pictool.reading import parse_json
from pictool.urls import open_url, without_credentials

_TIMEOUT_S = 600.0
_MAX_ANSWER = 16 << 20
MIN_PASTED = 32  # tokens of a pasted document: 16 are recognised, and as many may be lost at its edges
_BORDER = 64  # characters around it that are tokenized with it
_TTL_S, _RECOGNISED_S, _PAUSE_S = 3600, 60.0, 0.2


@dataclass(frozen=True)
class Compared:
    """A request, and tokens of its documents: as predicted, and as the server reused or computed them again.

    Fields:
        edges: of those predicted, tokens that the tokenizer merges with what surrounds a pasted document.
        exact: tokens that the server had from an earlier prompt that begins alike, documents among them.
        again: tokens of documents that the log had before.
        prompt: tokens of the whole prompt.
    """

    number: int
    predicted: int
    edges: int
    reported: int
    exact: int
    again: int
    prompt: int

    @property
    def is_as_predicted(self) -> bool:
        """Whether all but the edges was reused, and no more."""
        return self.predicted - self.edges <= self.reported + self.exact and self.reported <= self.predicted


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

    def answer(self, body: Mapping[str, Any], recognises: bool) -> Any:
        """The response to a request for one token.

        Args:
            recognises: whether documents in its texts are linked, or only those that are given as such.
        """
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return self._request(path, {**body, "max_tokens": 1, "temperature": 0, "pic": {"recognise": recognises}})

    def compile(self, texts: Sequence[str]) -> None:
        """Compile documents, and wait until they are recognised in prompts. They may go after an hour."""
        model = self.model()
        for text in texts:
            self._request("/v1/caches", {"model": model, "text": text, "ttl": _TTL_S})
        if not texts:
            return
        end = time.monotonic() + _RECOGNISED_S
        for number in count(1):  # no prompt begins like an earlier one, of which the server would reuse all
            if self.answer({"model": model, "prompt": f"{number}\n\n{texts[-1]}\n\n?"}, True)["pic"]["chunks"]:
                return
            if time.monotonic() > end:
                raise InputError(f"{self.shown}: recognises no document that it compiled {_RECOGNISED_S:g} seconds ago")
            time.sleep(_PAUSE_S)

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
    server: ReplayServer, prompts: Iterable[LoggedPrompt], tokenize: Tokenize, sample: int
) -> Iterator[Compared]:
    """Send the first requests of a log that have documents, and compare.

    A document that is given as one (`documents`, a part of type document, a marker) is linked in all its tokens, the
    first time too: `pic serve` compiles it then. Documents that requests of the sample have pasted into a message, and
    repeat, are compiled before; of these, the tokens at the edges may be lost.

    Raises:
        InputError: the server refuses one, or none of the log has a document.
    """
    having = (prompt for prompt in prompts if prompt.body is not None and documents_of(prompt))
    sampled = list(islice(having, sample))
    if not sampled:
        raise InputError("--replay: no request of this log has documents")
    uses = Counter(text for prompt in sampled for text in set(documents_of(prompt)) if not is_marked(prompt))
    pasted = [text for text, number in uses.items() if number > 1 and len(tokenize(text)) >= MIN_PASTED]
    server.compile(pasted)
    model, known = server.model(), set[str]()
    for number, prompt in enumerate(sampled, 1):
        places = [] if is_marked(prompt) else places_of(prompt, pasted)
        texts = documents_of(prompt) if is_marked(prompt) else [text for _, text, _ in places]
        sizes = [len(tokenize(text)) for text in texts]
        edges = sum(size - kept(tokenize, *place) for size, place in zip(sizes, places, strict=False))
        again = sum(size for text, size in zip(texts, sizes, strict=True) if text in known)
        known.update(texts)
        response = server.answer({**(prompt.body or {}), "model": model}, bool(places))
        try:
            report, total = response["pic"], int(response["usage"]["prompt_tokens"])
            reported, exact = (
                int(report["linked_tokens"]) + int(report["recomputed_tokens"]),
                int(report["exact_tokens"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(f"{server.shown}: does not report what it reused; is it a pic serve?") from error
        yield Compared(number, sum(sizes), edges, reported, exact, again, total)


def is_marked(prompt: LoggedPrompt) -> bool:
    """Whether documents are given as such."""
    return any(segment.is_marked for segment in prompt.segments)


def documents_of(prompt: LoggedPrompt) -> list[str]:
    """The documents that are given as such; if there are none, those between separators in its messages."""
    marked = [str(segment.content) for segment in prompt.segments if segment.is_marked]
    return marked or [
        text.strip()
        for segment in prompt.segments
        if isinstance(segment.content, str) and segment.kind != "assistant"
        for kind, text in split_text(segment.kind, segment.content)
        if kind == "document" and text.strip()
    ]


def places_of(prompt: LoggedPrompt, documents: Sequence[str]) -> list[tuple[str, str, str]]:
    """Where documents are in messages, longer ones first: some text before, the document, and some text after it."""
    found = []
    for text in (segment.content for segment in prompt.segments if isinstance(segment.content, str)):
        is_taken = bytearray(len(text))
        for document in sorted(documents, key=len, reverse=True):
            at = text.find(document)
            while at >= 0:
                end = at + len(document)
                if not any(is_taken[at:end]):
                    is_taken[at:end] = b"\1" * len(document)
                    found.append((text[max(0, at - _BORDER) : at], document, text[end : end + _BORDER]))
                at = text.find(document, end)
    return found


def kept(tokenize: Tokenize, before: str, document: str, after: str) -> int:
    """How many of a document's tokens, one after another, are the same in its surroundings."""
    own, joined = np.asarray(tokenize(document)), np.asarray(tokenize(before + document + after))
    most = 0
    for shift in range(-len(own) + 1, len(joined)):
        same = own[max(0, -shift) : len(joined) - shift] == joined[max(0, shift) : shift + len(own)]
        breaks = np.flatnonzero(~same)
        most = max(most, int(np.diff(np.concatenate(([-1], breaks, [len(same)]))).max()) - 1)
    return most
