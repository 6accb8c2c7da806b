"""Span queries over HTTP, as spnl's client sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pictool.engines.torch import TorchEngine
from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model
from pictool.serve.backends import query as served
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.query import STEP_NODES
from pictool.serve.backends.torch.engine_thread import EngineTask, TaskCancelled
from pictool.serve.routes import query as query_routes
from pictool.serve.tenants import Keys, Tenant
from pictool.spans import query as nodes
from pictool.spans.execute import Executor
from pictool.spans.reading import read_query
from pictool.spans.running import RunOptions
from pictool.store.store import Store
from serve.live import DOCS, NAME, QUESTION, Live, counts, serving, text_of, tiny_model, until, until_async

INPUT = {"cross": [{"plus": [{"user": doc} for doc in DOCS]}, {"user": QUESTION}]}
CALL = {"g": {"model": "spnl/any", "input": INPUT, "max_tokens": 6, "temperature": 0}}
REPEAT = {"repeat": {"n": 3, "g": CALL["g"] | {"temperature": 0.9}}}
MAP: dict[str, Any] = {
    "map": {"metadata": {"model": "spnl/any", "max_tokens": 4, "temperature": 0}, "inputs": ["Hi?", "Why?"]}
}


def execute(live: Live, query: object, stream: str = "false") -> Any:
    return live.client.post(
        "/v1/query/execute", params={"stream": stream}, content=json.dumps(query),
        headers={"Content-Type": "text/plain"},
    )  # fmt: skip


@pytest.mark.parametrize("query", [CALL, REPEAT, MAP], ids=["g", "repeat", "map"])
def test_a_query_gives_what_it_gives_here(
    live: Live, model: Model, store: Store, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_routes, "_PIECE", 2)
    with TorchEngine(model, store) as engine:
        executor = Executor(lambda _: engine, RunOptions(parse_policy("legolink-4"), keeps_outputs=False))
        done = executor.run(executor.optimise(read_query(json.dumps(query))).after).done
    texts = [call.text.strip() for call in done]
    response = execute(live, query)
    assert response.status_code == 200
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(texts)))
    assert [choice["text"] for choice in choices] == texts == [choice["message"]["content"] for choice in choices]
    lines = execute(live, query, "true").text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert [part["text"] for part in parts] == texts


@pytest.mark.parametrize(
    "query",
    [
        {"g": {"model": NAME, "input": {"file": "/etc/passwd"}}},
        {"g": {"model": NAME, "input": {"seq": [{"retrieve": {"from": "/etc", "query": {"user": "x"}}}]}}},
        {"ask": "who?"}, {"nonsense": 1}, [], "x", {"g": {"model": NAME, "input": {"user": "word " * 900}}},
    ],
)  # fmt: skip
def test_what_cannot_be_run_here_is_refused(live: Live, query: object) -> None:
    response = execute(live, query)
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert "/etc/passwd" not in response.text or "root" not in response.text


@pytest.mark.parametrize("name", [NAME, f"spnl/{NAME}", f"pic/{NAME}", "spnl/any", "any", "default"])
def test_a_query_names_the_model_that_is_served(live: Live, name: str) -> None:
    """As spnl's client does, after its own provider; or it takes whichever is served."""
    assert texts_of(execute(live, {"g": CALL["g"] | {"model": name}})) == texts_of(execute(live, CALL))


@pytest.mark.parametrize("name", ["spnl/other", f"openai/{NAME}", "other"])
def test_a_query_of_another_model_is_refused_wherever_it_names_it(live: Live, name: str) -> None:
    call: dict[str, Any] = CALL["g"] | {"model": name}
    metadata = MAP["map"]["metadata"] | {"model": name}
    whole: list[object] = [
        {"g": call}, {"chat": call}, {"repeat": {"n": 2, "g": call}}, {"map": MAP["map"] | {"metadata": metadata}},
        {"seq": [CALL, {"g": CALL["g"] | {"input": {"cross": [{"g": call}, {"user": QUESTION}]}}}]},
    ]  # fmt: skip
    for query in whole:
        response = execute(live, query)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert repr(name) in error["message"] and NAME in error["message"]


def test_calls_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MAX_CALLS", 5)
    assert execute(live, {"seq": [REPEAT, MAP]}).status_code == 200
    response = execute(live, {"seq": [REPEAT, MAP, {"chat": CALL["g"]}]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("query: has 6 calls")


def test_bodies_that_are_no_queries(live: Live) -> None:
    for body in (b"", b"{", b"\xff"):
        live.error(400, "POST", "/v1/query/execute", content=body)


# Side by side


def long_query(calls: int, tokens: int) -> dict[str, Any]:
    """A query of several calls."""
    return {"repeat": {"n": calls, "g": CALL["g"] | {"temperature": 1.5, "max_tokens": tokens}}}


def texts_of(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


@contextmanager
def narrow(root: Path, **settings: Any) -> Iterator[Live]:
    """A server of two tenants, `a` and `b`, on which one request runs."""
    keys = Keys({name: Tenant(name, f"salt of {name}") for name in "ab"})
    backend = BackendSettings(parse_policy("legolink-4"), max_active=1, refresh_s=3600, **settings)
    with serving(tiny_model(), Store(root), keys, backend, key="a") as live:
        yield live


def test_a_long_query_lets_queries_and_requests_in_between_its_calls(tmp_path: Path) -> None:
    with narrow(tmp_path) as live, ThreadPoolExecutor(1) as threads:
        alone = texts_of(execute(live, long_query(24, 40)))
        running = threads.submit(execute, live, long_query(24, 40))
        until(lambda: live.backend.status().active == 1)
        assert texts_of(execute(live, CALL)) and text_of(live.chat(QUESTION)) is not None
        with live.client_of("b") as other:
            body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}
            assert other.post("/v1/chat/completions", json=body).status_code == 200
        assert not running.done(), "they did not wait for all of its calls"
        assert texts_of(running.result()) == alone


def test_queries_at_once_give_what_they_give_one_after_another(tmp_path: Path) -> None:
    asked = [CALL, REPEAT, MAP, long_query(3, 9), {"seq": [{"monad": CALL}, CALL]}, {"par": [CALL, MAP]}]
    with narrow(tmp_path, max_waiting=64) as live:
        live.backend._thread._most = 3
        want = [texts_of(execute(live, query)) for query in asked]
        chats = [text_of(live.chat(f"Really {i}?")) for i in range(6)]
        with ThreadPoolExecutor(12) as threads, live.client_of("b") as other:
            bs = Live(live.url, live.backend, live.service, live.store, "b")
            queries = [threads.submit(execute, each, query) for query in asked for each in (live, bs)]
            answers = [threads.submit(live.chat, f"Really {i}?") for i in range(6)]
            assert [texts_of(each.result()) for each in queries] == [texts for texts in want for _ in range(2)]
            assert [text_of(each.result()) for each in answers] == chats
            assert other.get("/v1/caches").json()["data"] == []
            bs.client.close()
        assert live.backend.status().active == live.backend.status().waiting == 0


def test_queries_wait_in_the_bounded_queue_and_vanish_with_their_clients(tmp_path: Path) -> None:
    """One runs, two wait; a fourth is refused; another tenant's second takes a place. None ends in this time."""
    with narrow(tmp_path, max_waiting=2) as live:
        status = live.backend.status

        async def run() -> None:
            async with httpx.AsyncClient(base_url=live.url, timeout=600) as client:
                content = json.dumps(long_query(255, 200))

                async def post(key: str) -> int:
                    headers = {"Authorization": f"Bearer {key}"}
                    return (await client.post("/v1/query/execute", content=content, headers=headers)).status_code

                tasks = []
                for waiting in range(3):
                    tasks.append(asyncio.create_task(post("a")))
                    await until_async(counts(live, 1, waiting))
                assert await post("a") == 429 and status().waiting == 2
                others = [asyncio.create_task(post("b"))]
                await until_async(lambda: status().active == 2)  # beside the other tenant's
                others.append(asyncio.create_task(post("b")))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                assert [task.result() for task in done] == [429] and status().waiting <= 2
                for task in (*tasks, *others):
                    task.cancel()
                await asyncio.gather(*tasks, *others, return_exceptions=True)

        asyncio.run(run())
        until(lambda: status().active == status().waiting == 0)
        assert text_of(live.chat(QUESTION)) is not None


def test_a_large_query_is_read_in_pieces(model: Model, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them others have their steps; of a client that went away no further one is read."""
    made, counts, make = 0, list[int](), nodes.Query.__post_init__

    def counted(node: nodes.Query) -> None:
        nonlocal made
        made += 1
        make(node)

    def checkpoint(pause: str) -> None:
        nonlocal made
        counts.append(made)
        made = 0
        if len(counts) == stops_at:
            raise TaskCancelled

    monkeypatch.setattr(nodes.Query, "__post_init__", counted)
    monkeypatch.setattr("pictool.runtime.turns.checkpoint", checkpoint)
    calls = [
        {"chat": {"model": "m", "input": [{"user": f"a{i}"}, {"plus": [{"plus": [{"user": "b"}]}]}]}}
        for i in range(400)
    ]
    text, stops_at = json.dumps({"seq": [{"par": calls}, REPEAT]}), 0
    with TorchEngine(model, store) as engine:
        options = RunOptions(parse_policy("full"), side_by_side=False)
        read = partial(served.ServedQuery, text, engine, ("m", ""), options)
        read()
        assert sum(counts) > 5000 and len(counts) > 15 and max(counts) < 4 * STEP_NODES
        counts, stops_at = [], 3
        with pytest.raises(TaskCancelled):
            read()
    assert len(counts) == 3


def test_each_object_of_a_request_is_a_turn_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of /v1/link, of a call, of marked parts, and of caches; what is stored already is none."""
    turns, checkpoint = 0, EngineTask.checkpoint

    def counted(task: EngineTask, ends_turn: bool = False) -> None:
        nonlocal turns
        turns += ends_turn
        checkpoint(task, ends_turn)

    def turns_of(ask: Callable[[], Any]) -> int:
        nonlocal turns
        turns = 0
        assert ask()
        return turns

    def documents(start: str) -> list[str]:
        return [start + doc for doc in DOCS]

    def link() -> list[Any]:
        texts = [{"text": text, "source": str(i)} for i, text in enumerate(documents("Link. "))]
        body = {"query": QUESTION, "documents": texts, "policy": {"algo": "legolink", "k": 4}}
        events = live.client.post("/v1/link", json=body).text.split("\n\n")
        return [event for event in events if "compiled" in event or "report" in event]

    def call() -> list[str]:
        plus = {"plus": [{"user": text} for text in documents("Query. ")]}
        return texts_of(execute(live, {"g": CALL["g"] | {"input": {"cross": [plus, {"user": QUESTION}]}}}))

    def chat() -> bool:
        marked = [{"type": "document", "text": text} for text in documents("Chat, and a long one at that. ")]
        return text_of(live.chat([*marked, {"type": "text", "text": QUESTION}])) is not None

    monkeypatch.setattr(EngineTask, "checkpoint", counted)
    with narrow(tmp_path) as live:
        assert turns_of(link) == 4  # with the head's
        assert turns_of(link) == 0
        assert turns_of(call) == turns_of(chat) == 3
        assert turns_of(call) == turns_of(chat) == 0
        assert turns_of(lambda: live.cache(" ".join(documents("Cache. ")), chunk_tokens=20)) > 3


def test_calls_of_a_query_have_the_servers_limit_of_tokens(tmp_path: Path) -> None:
    with narrow(tmp_path, max_tokens=3) as live:
        short = texts_of(execute(live, {"g": CALL["g"] | {"max_tokens": 3}}))
        assert texts_of(execute(live, {"g": CALL["g"] | {"max_tokens": 400}})) == short
