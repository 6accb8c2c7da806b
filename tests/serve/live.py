"""A server in the test process: uvicorn in a thread, on a free port, with a tiny model."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import tiny

from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model, wrap_model
from pictool.serve.app import make_app
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.running import Server
from pictool.serve.service import Service, ServiceSettings
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store

NAME = "tiny"
DOCS = [
    "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n",
    "Numbers such as 1,024 or 3.14 stand here too, and words: naïve, Straße.\n",
    "She asked for the tabs of the harbour, and lines of the festival there.\n",
]
QUESTION = "Really?"
KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b")})
_WAIT_S = 60.0
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools {{ tools | map(attribute='function.name') | join(' ') }}]{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}\n{% endfor %}[assistant]"
)


RESPONSES = {  # how a model that speaks by TEMPLATE writes reasoning and calls
    "start_anchor": "[assistant]",
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>", "close": "</call>", "content": "json", "repeats": True,
            "transform": {
                "type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}
            },
        },
    },
}  # fmt: skip


def tiny_model(
    template: str | None = None, name: str = NAME, responses: dict[str, Any] | None = None, positions: int = 512
) -> Model:  # fmt: skip
    """A random Llama, with a chat template if one is given, and how it writes calls."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    tokenizer.response_template = responses
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = positions
    return wrap_model(tiny.random_module(config), tokenizer, name)


@dataclass
class Live:
    """A running server. `client` sends the key `key`."""

    url: str
    backend: TorchBackend
    service: Service
    store: Store
    key: str = "none"
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.client_of(self.key)

    def client_of(self, key: str | None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def ok(self, method: str, path: str, **more: Any) -> Any:
        """The JSON of a request that is answered."""
        response = self.client.request(method, path, **more)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, status: int, method: str, path: str, **more: Any) -> Any:
        """The error of one that is refused."""
        response = self.client.request(method, path, **more)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        return error

    def chat(self, content: object, **more: Any) -> Any:
        """A chat completion at temperature 0."""
        messages = more.pop("messages", [{"role": "user", "content": content}])
        body = {"model": NAME, "temperature": 0, "max_tokens": 8, "messages": messages} | more
        return self.ok("POST", "/v1/chat/completions", json=body)

    def cache(self, text: str, **more: Any) -> str:
        """The id of a new cache."""
        return str(self.ok("POST", "/v1/caches", json={"model": NAME, "text": text} | more)["id"])


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens soon."""
    end = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def counts(live: Live, active: int, waiting: int) -> Callable[[], bool]:
    """Whether so many requests run and wait. One that came holds a place of those that wait until it runs."""

    def are_met() -> bool:
        status = live.backend.status()
        return (status.active, status.waiting) == (active, waiting)

    return are_met


async def until_async(condition: Callable[[], bool]) -> None:
    """The same beside other tasks of an event loop, each of which a busy machine may hold up."""
    async with asyncio.timeout(5 * _WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def text_of(response: Any) -> str:
    """The first answer of a chat completion."""
    return str(response["choices"][0]["message"]["content"])


class Script:
    """What a model says: texts, each of the next answer's; with `END` it ends there, else at its limit."""

    def __init__(self) -> None:
        self.texts = list[str]()

    def says(self, *texts: str) -> None:
        self.texts = [*texts]

    def install(self, monkeypatch: Any) -> Script:
        """Let it choose every token of the torch engine."""
        script, tokenizer = self, tiny.tokenizer()

        class Chooser:
            def __init__(self, sampling: object, *_: object) -> None:
                text = script.texts.pop(0) if script.texts else END
                self._ids = list(tokenizer.encode(text, add_special_tokens=False))

            def __call__(self, logits: object) -> int:
                return int(self._ids.pop(0)) if self._ids else 5

        monkeypatch.setattr("pictool.runtime.decode._Chooser", Chooser)
        return self


END = "</s>"


@contextmanager
def serving(
    model: Model, store: Store, keys: Keys | None = None, settings: BackendSettings | None = None,
    service_settings: ServiceSettings = ServiceSettings(), key: str = "none",
) -> Iterator[Live]:  # fmt: skip
    """A server that runs until the end."""
    backend = TorchBackend(model, store, settings or BackendSettings(parse_policy("legolink-4"), refresh_s=3600))
    with serving_backend(backend, store, keys, service_settings, key) as live:
        yield live


@contextmanager
def serving_backend(
    backend: Any, store: Store, keys: Keys | None = None, service_settings: ServiceSettings = ServiceSettings(),
    key: str = "none",
) -> Iterator[Live]:  # fmt: skip
    """A server of a backend, which ends with it."""
    tenants = keys or Keys(default=Tenant("default"))
    with running(Service(backend, store.root, tenants, service_settings), store, key) as live:
        yield live


@contextmanager
def running(service: Service, store: Store, key: str = "none") -> Iterator[Live]:
    """A server of a service, whose backend ends with it."""
    backend: Any = service.backend
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = Server(make_app(service, "test"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            live = Live(f"http://127.0.0.1:{listener.getsockname()[1]}", backend, service, store, key)
            yield live
            live.client.close()
        finally:
            server.should_exit = True
            thread.join()
            backend.close()
