"""Clients of a server: those that send the fuzzer's requests, and an ordinary one whose waits are measured."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import tiny

from vllm_fuzz.judge import Response, Verdict
from vllm_fuzz.requests import Asked, Requests
from vllm_fuzz.scene import Prompt, Scene

TIMEOUT_S = 300.0
_HANGS_UP_S = 0.02


@dataclass(frozen=True)
class Exchange:
    """A request and its response."""

    number: int
    asked: Asked
    response: Response


class Client:
    """Sends requests, each over a connection of its own."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc

    def ask(self, asked: Asked) -> Response:
        """Send a request; a client that leaves reads no response."""
        started = time.perf_counter()
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request(asked.method, asked.path, asked.body, {"Content-Type": "application/json"})
            if asked.leaves:
                time.sleep(_HANGS_UP_S)
                return Response(0, "the client left", time.perf_counter() - started)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            return Response(response.status, text, time.perf_counter() - started)
        except (OSError, http.client.HTTPException) as error:
            return Response(0, f"{type(error).__name__}: {error}", time.perf_counter() - started)
        finally:
            connection.close()

    def is_alive(self) -> bool:
        """Whether the server says that its engine is."""
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ask_whole(self, scene: Scene, prompt: Prompt, named: bool) -> Verdict:
        """Ask for all documents of a prompt to be linked, as nobody's; a problem if one is not."""
        fields: dict[str, Any] = {"recognise": True, "policy": "naive"}
        places = prompt.places
        if named:
            fields = {"policy": "naive", "keys": [scene.key(place.document, "", "none") for place in places]}
        else:
            places = tuple(place for place in places if place.num_tokens >= 8)
        body = {"model": "tiny", "prompt": list(prompt.tokens), "max_tokens": 1, "kv_transfer_params": {"pic": fields}}
        response = self.ask(Asked("whole", "/v1/completions", json.dumps(body), prompt))
        report = (json.loads(response.text).get("kv_transfer_params") or {}).get("pic") if response.text else None
        found, state = (0, "") if report is None else (report["chunks"], report["state"])
        is_linked = found == len(places) and (not places or state in ("linked", "cached"))
        return Verdict("whole", None if is_linked else f"{found} of {len(places)} documents: {response.text[-400:]}")


class Clients:
    """Several clients, each of which sends the next request once it has the response to its last one."""

    def __init__(self, url: str, requests: Requests, count: int) -> None:
        self._url, self._requests, self._count = url, requests, count
        self._exchanges: list[Exchange] = []
        self._is_dead = threading.Event()
        self.problems: list[str] = []

    def run(self, numbers: Iterable[int]) -> list[Exchange]:
        """Send requests; stops early if the server dies."""
        taken, lock = iter(numbers), threading.Lock()

        def send() -> None:
            client = Client(self._url)
            while not self._is_dead.is_set():
                with lock:
                    number = next(taken, None)
                if number is None:
                    return
                self._send(client, number)

        with ThreadPoolExecutor(self._count, "client") as threads:
            for sending in [threads.submit(send) for _ in range(self._count)]:
                sending.result()
        return sorted(self._exchanges, key=lambda exchange: exchange.number)

    def _send(self, client: Client, number: int) -> None:
        asked = self._requests.make(number)
        response = client.ask(asked)
        self._exchanges.append(Exchange(number, asked, response))
        is_strange = response.status >= 500 or (response.status == 0 and not asked.leaves)
        if is_strange and not client.is_alive() and not self._is_dead.is_set():
            self._is_dead.set()
            self.problems.append(f"the server died at request {number}: {response.text[:500]}")


class Ordinary(threading.Thread):
    """A client that asks for nothing of the connector, one request after another."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(name="ordinary", daemon=True)
        self._client, self._draw = Client(url), random.Random(f"ordinary {seed}")
        self._ends = threading.Event()
        self.exchanges: list[Exchange] = []

    def run(self) -> None:
        while not self._ends.wait(0.02):
            self.exchanges.append(self.ask(len(self.exchanges)))

    def ask(self, number: int) -> Exchange:
        """Send one request."""
        prompt = Prompt((*(self._draw.randrange(3, tiny.VOCAB) for _ in range(24)), 35), ())
        body = {
            "model": "tiny", "prompt": list(prompt.tokens), "max_tokens": 2, "temperature": 0, "logprobs": 5,
            "ignore_eos": True, "return_tokens_as_token_ids": True, "return_token_ids": True,
        }  # fmt: skip
        asked = Asked("ordinary", "/v1/completions", json.dumps(body), prompt)
        return Exchange(number, asked, self._client.ask(asked))

    def stop(self) -> None:
        self._ends.set()
        self.join()

    def summary(self) -> dict[str, float]:
        """How many requests there were, and the seconds that they took."""
        seconds = sorted(exchange.response.seconds for exchange in self.exchanges)
        if not seconds:
            return {"requests": 0}
        at = {"median": statistics.median(seconds), "p99": seconds[int(len(seconds) * 0.99)], "longest": seconds[-1]}
        return {"requests": len(seconds), **{name: round(value, 3) for name, value in at.items()}}
