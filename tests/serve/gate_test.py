"""What a server does with a request before it is one: keys, bounds of heads and bodies, pages of other sites."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pictool.core import Sampling
from pictool.errors import InputError, ModelError
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.reading import require_shape
from pictool.runtime.model import Model
from pictool.serve import app, bodies, running
from pictool.serve.answers import AnswerCollector, EventStream, PartialAnswer
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.query import MAX_CALLS
from pictool.serve.errors import ApiError
from pictool.serve.routes.openai import ChatForm, CompletionForm
from pictool.serve.running import run
from pictool.serve.schema import ChatMessage, ChatRequest, CompletionRequest
from pictool.serve.start import start_backend
from pictool.serve.tenants import Keys, Tenant
from pictool.spans.query import MAX_NODES
from pictool.store.store import Store
from serve.live import NAME, Live, serving, text_of, tiny_model, until

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
KEY = "k" * 20


@pytest.fixture(scope="module")
def keyed(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a key."""
    keys = Keys({KEY: Tenant("a", "salt")})
    with serving(model, Store(tmp_path_factory.mktemp("keyed") / "store"), keys, key=KEY) as live:
        yield live


def said(live: Live, data: bytes) -> bytes:
    """What a server says to bytes, until it closes the connection or has said the head of a response."""
    with socket.create_connection(("127.0.0.1", httpx.URL(live.url).port or 0), 60) as connection:
        connection.sendall(data)
        got = b""
        while b"\r\n\r\n" not in got and (part := connection.recv(1 << 16)):
            got += part
        return got


# Keys


@pytest.mark.parametrize(
    "route",
    ["POST " + CHAT, "POST /v1/files", "POST /v1/caches", "PATCH /v1/caches/x", "GET /nosuch", "OPTIONS /metrics",
     "POST /v1/query/execute", "POST /v1/link", "POST /v1/messages",
     "POST /v1/responses", "GET /v1/responses/x", "POST /v1beta/models/x:generateContent", "GET /v1/models"],
)  # fmt: skip
def test_a_key_is_asked_for_before_a_body_has_come(keyed: Live, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the body that its head promises, nothing is sent; a wrong one would not be looked at."""
    monkeypatch.setattr(bodies, "parse", lambda _: pytest.fail("it was parsed"))
    for length in (100_000, 1 << 40):
        head = (
            f"{route} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n".encode()
            + b"Content-Type: application/json\r\n"
        )
        assert said(keyed, head + b"\r\n").startswith(b"HTTP/1.1 401 ")
        assert said(keyed, head + b"Authorization: Bearer wrong\r\n\r\n{").startswith(b"HTTP/1.1 401 ")


def test_what_needs_no_key(keyed: Live) -> None:
    with keyed.client_of(None) as client:
        assert client.get("/health").status_code == client.head("/health").status_code == 200
        assert client.get("/version").status_code == 200


# Bodies


def wrong_bodies() -> Iterator[tuple[str, Any]]:
    parts = [{"type": "text", "text": 5}] * 9_000
    yield "9,000 wrong parts", {"model": NAME, "messages": [{"role": "user", "content": parts}]}
    yield "9,000 wrong messages", {"model": NAME, "messages": [{"role": 5}] * 9_000}
    yield "wrong prompts", {"model": NAME, "prompt": [{}] * 50_000}
    yield "wrong numbers", {"model": NAME, "messages": [], "logit_bias": {str(i): "x" for i in range(50_000)}}
    yield "too many messages", {"model": NAME, "messages": [{"role": "user", "content": ""}] * 20_000}


@pytest.mark.parametrize(("what", "body"), list(wrong_bodies()), ids=[what for what, _ in wrong_bodies()])
def test_of_many_mistakes_few_are_looked_at(
    keyed: Live, what: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each was listed, 1 MiB of them held the event loop for 38 s, and took 5 GB."""
    counts = list[int]()

    def count(errors: Any) -> ApiError:
        counts.append(len(errors))
        return invalid(errors)

    invalid = bodies.invalid
    monkeypatch.setattr(bodies, "invalid", count)
    path = "/v1/completions" if "prompt" in body else CHAT
    assert len(keyed.error(422, "POST", path, json=body)["message"]) < 500
    assert counts and max(counts) <= 20


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"[" * 100_000, "deeper than 64"), (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than 64"),
        (b"[" + b"[]," * 70_000 + b"1]", "65,536 lists"), (b"[" + b"1," * 1_100_000 + b"1]", "1,048,576 values"),
        (b'["' + b'","' * 1_100_000 + b'"]', "1,048,576 values"), (b'{"a":"' + b'\\"' * 100_000, "not JSON"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_costs_more_than_its_bytes_is_not_parsed(keyed: Live, data: bytes, word: str) -> None:
    assert word in keyed.error(400, "POST", CHAT, content=data, headers=JSON)["message"]
    if "lists" not in word:
        assert keyed.error(400, "POST", "/v1/query/execute", content=data, headers=JSON)["message"]


@pytest.mark.parametrize(
    "query",
    [
        {"par": [{"g": {"model": "any", "input": {"user": "a"}, "temperature": 0, "max_tokens": 2}}] * (MAX_CALLS - 1)},
        {"seq": [{"monad": {"plus": [{"user": "a"}, {"user": "b"}]}}] * (MAX_NODES // 6)},
    ],
    ids=["calls that are equal", "prepared"],
)
def test_span_queries_of_as_many_nodes_as_there_may_be_are_read(keyed: Live, query: object) -> None:
    data = json.dumps(query, separators=(",", ":")).encode()
    assert data.count(b"{") + data.count(b"[") > 1 << 16, "more than any other body may have"
    response = keyed.client.post("/v1/query/execute", content=data, headers=JSON)
    assert response.status_code == 200, response.text


def test_a_span_query_of_more_containers_than_nodes_can_have_is_refused_unread(
    keyed: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed.backend, "execute", lambda *_: pytest.fail("it was read"))
    data = b'{"seq":[' + b"{}," * 4 * MAX_NODES + b"{}]}"
    message = keyed.error(400, "POST", "/v1/query/execute", content=data, headers=JSON)["message"]
    assert message.startswith("body: ") and f"{4 * MAX_NODES:,d} lists" in message and "\n" not in message


def test_a_deep_schema_is_refused_where_requests_are_read(live: Live) -> None:
    """Before any engine has it; one that is as deep as people write is."""
    for depth, status in ((100, 400), (30, 200)):
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth):
            schema = {"items": schema}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": "Really?"}]
        answer = live.client.post(CHAT, json={"model": NAME, "messages": messages, "response_format": form})
        assert answer.status_code == status, answer.text
        assert status == 200 or "deeper than 64" in answer.json()["error"]["message"]


def test_the_shape_of_texts_is_not_counted() -> None:
    require_shape(json.dumps({"a": '[{",\\' * 100_000, "b": ["\\", '"']}).encode(), 2)
    with pytest.raises(ValueError, match="deeper"):
        require_shape(b'{"\\\\":[[]]}', 2)


def test_a_large_body_is_parsed_beside_the_event_loop(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, parse = list[str](), bodies.parse

    def noted(data: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse(data)

    monkeypatch.setattr(bodies, "parse", noted)
    for size in (10, 100_000):
        keyed.error(404, "POST", CHAT, json={"model": "x" * size, "messages": [{"role": "user", "content": "a"}]})
    assert not threads[0].startswith("pic-bodies") and threads[1].startswith("pic-bodies")


def test_a_body_that_does_not_come_is_not_waited_for(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.1)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nAuthorization: Bearer {KEY}\r\n".encode()
    for more in (b"Content-Type: application/json\r\n\r\n{", b"Content-Type: application/json\r\n\r\n"):
        assert said(keyed, head + more).startswith(b"HTTP/1.1 408 ")


# Heads


def test_heads_are_bounded_in_bytes_time_and_number(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (1 << 20)
    assert said(keyed, endless).startswith(b"HTTP/1.1 400 ")
    monkeypatch.setattr(running, "_MAX_HEADS", 4)
    monkeypatch.setattr(running, "_CROWDED_S", 0)
    half = [socket.create_connection(("127.0.0.1", httpx.URL(keyed.url).port or 0), 60) for _ in range(12)]
    for connection in half:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost")
    for connection in half[:7]:  # the oldest are closed
        with suppress(ConnectionResetError):
            assert connection.recv(10) == b""
    assert keyed.ok("GET", "/health")["status"] == "ok"
    for connection in half:
        connection.close()
    monkeypatch.setattr(running, "_HEAD_S", 0.05)
    assert said(keyed, b"GET /health HTTP/1.1\r\nHost") == b""
    late = said(keyed, b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    assert late.startswith(b"HTTP/1.1 401 ")


def test_many_connections_at_once_are_all_answered(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_CROWDED_S", 60)
    address = ("127.0.0.1", httpx.URL(keyed.url).port or 0)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(running._MAX_HEADS + 44)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}


def test_a_chunk_that_is_malformed_ends_its_connection(keyed: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Before the response, and after it was sent; the log has a line."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer "
    head += f"{KEY}\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n".encode()
    assert said(keyed, head % CHAT.encode() + b"zz\r\n").startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", httpx.URL(keyed.url).port or 0), 60) as client:
        client.sendall(head % b"/v1/nothing")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"zz\r\n")
        while client.recv(1 << 16):
            pass
    assert keyed.ok("GET", "/health")["status"] == "ok"
    assert caplog.records and not [record for record in caplog.records if record.exc_info]


# Pages of other sites


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200), ({"Host": "localhost:1"}, 200), ({"Host": "[::1]:1"}, 200), ({"Host": "127.0.0.1"}, 200),
        ({"Host": "evil.example"}, 403), ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200), ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403), ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
    ],
)  # fmt: skip
def test_without_keys_a_page_of_another_site_is_refused(
    live: Live, keyed: Live, headers: dict[str, str], status: int
) -> None:
    for path in ("/v1/models", "/metrics"):
        assert live.client.get(path, headers=headers).status_code == status
    assert keyed.client.get("/v1/models", headers=headers).status_code == 200
    response = live.client.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


# Numbers


def test_numbers_are_coerced_where_values_enter() -> None:
    sampling = Sampling(temperature=1, top_p=1, seed=7.0)  # type: ignore[arg-type]
    assert (type(sampling.temperature), type(sampling.top_p), type(sampling.seed)) == (float, float, int)
    spec = Spec(max_new_tokens=4.0)  # type: ignore[arg-type]
    assert type(spec.max_new_tokens) is int
    for wrong in (True, "1", float("nan"), float("inf"), 10**400, None, 1 + 0j):
        for name in ("temperature", "top_p", "seed"):
            with pytest.raises(InputError, match=name.replace("_", "-")):
                Sampling(**{name: wrong})  # type: ignore[arg-type]
    for field in ("max_new_tokens", "chunk_tokens"):
        with pytest.raises(InputError, match=field):
            Spec(**{field: 1.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0, 1, 2, 0.5, True, "1", 10**400, float("inf"), -1, [], None])
def test_a_temperature_of_a_span_query(live: Live, temperature: object) -> None:
    call = {"g": {"model": "any", "input": {"user": "Really?"}, "max_tokens": 2, "temperature": temperature}}
    response = live.client.post("/v1/query/execute", content=json.dumps(call), headers=JSON)
    is_fit = temperature is None or (type(temperature) in (int, float) and temperature in (0, 1, 2, 0.5))
    assert response.status_code == (200 if is_fit else 400), response.text


# The beginning and the end


def free_listener() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


class Ending:
    """A backend whose engine ends, or whose answers do once it is closed."""

    def __init__(self, lives: bool) -> None:
        self._lives, self.closed = lives, asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def lives(self) -> bool:
        return self._lives

    def close(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.closed.set)


def test_a_server_whose_engine_ended_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with free_listener() as listener, pytest.raises(ModelError, match="engine"):
        run(FastAPI(), listener, Ending(lives=False))  # type: ignore[arg-type]


def test_requests_that_run_are_told_that_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn would cancel them, which is a plain-text 500, and a stream without an end."""
    monkeypatch.setattr(running, "_GRACE_S", 0.1)
    backend = Ending(lives=True)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        backend.loop = asyncio.get_running_loop()
        await backend.closed.wait()
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"ends"})

    with free_listener() as listener:
        server = running.Server(answer, backend)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: server.started)
        address, got = listener.getsockname(), list[httpx.Response]()
        asking = threading.Thread(target=lambda: got.append(httpx.get(f"http://127.0.0.1:{address[1]}/x", timeout=60)))
        asking.start()
        until(lambda: backend.loop is not None)
        server.should_exit = True
        thread.join(60)
        asking.join(60)
    assert got[0].status_code == 503 and got[0].text == "ends"


# Clients that do not read


class Endless:
    """A stream without an end; counts what was taken of it."""

    def __init__(self) -> None:
        self.num_bytes, self.is_over = 0, threading.Event()

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.num_bytes += 1 << 14
                yield b"x" * (1 << 14)
                await asyncio.sleep(0)
        finally:
            self.is_over.set()


def test_a_client_that_does_not_read_its_stream_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source ends, its connection too; until then what is made for it waits in the buffers of the connection."""
    monkeypatch.setattr(running, "UNREAD_S", 0.2)
    source = Endless()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await EventStream(source.events())(scope, receive, send)

    with free_listener() as listener:
        server = running.Server(answer)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: server.started)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert source.is_over.wait(60)
            until(lambda: not server.server_state.connections)
        server.should_exit = True
        thread.join(60)
    assert 0 < source.num_bytes < 64 << 20


class Buffer:
    """A transport with bytes that its client has not read, and a loop that only notes what is to be called."""

    def __init__(self) -> None:
        self.unread, self.is_aborted, self.later = 10 << 20, False, list[Callable[[], None]]()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.is_aborted = True

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        assert delay == running.UNREAD_S
        self.later.append(call)


def test_a_client_that_reads_slowly_is_waited_for() -> None:
    """64 KiB in each time are enough, as many as there are; a byte is not."""
    protocol, buffer = running.Protocol.__new__(running.Protocol), Buffer()
    protocol.transport = protocol.loop = buffer  # type: ignore[assignment]
    protocol._wait_for_reader()
    for _ in range(5):
        buffer.unread -= 64 << 10
        buffer.later.pop()()
        assert len(buffer.later) == 1 and not buffer.is_aborted
    buffer.unread -= 1
    buffer.later.pop()()
    assert buffer.is_aborted and not buffer.later


def test_an_engine_that_ends_ends_the_server(model: Model, tmp_path: Path) -> None:
    with serving(model, Store(tmp_path / "store")) as live:
        assert asyncio.run(live.backend.lives())
        live.backend.close()
        assert not asyncio.run(live.backend.lives())
        response = live.client.get("/health")
        assert response.status_code == 503 and response.json()["status"] == "dead"
        body = {"model": NAME, "messages": [{"role": "user", "content": "Really?"}]}
        assert live.error(503, "POST", CHAT, json=body)["code"] == "server_ends"


# What clients met


def test_a_text_may_end_in_blank_lines(live: Live) -> None:
    assert text_of(live.chat("Really?\n\n \n")) == text_of(live.chat("Really?"))


def test_logprobs_of_an_empty_answer_are_an_empty_list() -> None:
    for has_logprobs in (True, False):
        chat = ChatRequest(model=NAME, messages=[ChatMessage(role="user")], logprobs=has_logprobs)
        completion = CompletionRequest(model=NAME, prompt="", logprobs=0 if has_logprobs else None)
        for form, field in ((ChatForm(NAME, chat), "content"), (CompletionForm(NAME, completion, 1), "tokens")):
            form.collected = [AnswerCollector(answers={0: PartialAnswer(reason="stop")})]
            logprobs = form.whole()["choices"][0]["logprobs"]
            assert logprobs[field] == [] if has_logprobs else logprobs is None


def test_metrics_are_there_while_leases_are_damaged(model: Model, tmp_path: Path) -> None:
    with serving(model, Store(tmp_path / "store")) as live:
        live.cache("The harbour was quiet. It holds a festival in the spring; nobody knows why.")
        (tmp_path / "store" / "store.sqlite3").write_bytes(b"x" * 5000)
        text = live.client.get("/metrics").text
        assert "pic_leases NaN" in text and "pic_active_requests 0.0" in text


REFUSING = (
    "{{ bos_token }}{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
)


def test_a_model_is_called_as_its_clients_call_it(tmp_path: Path) -> None:
    """Where it is on the server's disk, no client is told: neither by its template nor by its length."""
    settings = BackendSettings(parse_policy("legolink-4"), refresh_s=3600, name="served")
    model = tiny_model(REFUSING, "/where/models/are")
    with serving(model, Store(tmp_path / "store"), settings=settings) as live:
        messages = [{"role": "user", "content": "Really?"}] * 2
        asked = [
            ([{"role": "user", "content": "word " * 900}], "served has"), (messages, "served: its chat template")
        ]  # fmt: skip
        for messages, words in asked:
            error = live.error(400, "POST", CHAT, json={"model": "served", "messages": messages})
            assert words in error["message"] and "/where" not in error["message"]


def test_what_the_start_up_check_found_names_the_model_as_its_clients_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pictool.fidelity.divergence.FEW_NATS", 0.0)
    settings, model = BackendSettings(parse_policy("naive"), name="served"), tiny_model(name="/where/models/are")
    with start_backend(model, Store(tmp_path / "store"), settings, 0.0) as backend:
        assert backend.problem is not None and "of served are" in backend.problem and "/where" not in backend.problem
