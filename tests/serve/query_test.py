"""Span queries over HTTP, as spnl's client sends them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pictool.engines.torch import TorchEngine
from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model
from pictool.spans.execute import Executor, RunOptions
from pictool.spans.reading import read_query
from pictool.store.store import Store
from serve.live import DOCS, QUESTION, Live

INPUT = {"cross": [{"plus": [{"user": doc} for doc in DOCS]}, {"user": QUESTION}]}
CALL = {"g": {"model": "spnl/any", "input": INPUT, "max_tokens": 6, "temperature": 0}}
REPEAT = {"repeat": {"n": 3, "g": CALL["g"] | {"temperature": 0.9}}}
MAP = {"map": {"metadata": {"model": "spnl/any", "max_tokens": 4, "temperature": 0}, "inputs": ["Hi?", "Why?"]}}


def execute(live: Live, query: object, stream: str = "false") -> Any:
    return live.client.post(
        "/v1/query/execute", params={"stream": stream}, content=json.dumps(query),
        headers={"Content-Type": "text/plain"},
    )  # fmt: skip


@pytest.mark.parametrize("query", [CALL, REPEAT, MAP], ids=["g", "repeat", "map"])
def test_a_query_gives_what_it_gives_here(live: Live, model: Model, store: Store, query: dict[str, Any]) -> None:
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
        {"g": {"model": "m", "input": {"file": "/etc/passwd"}}},
        {"g": {"model": "m", "input": {"seq": [{"retrieve": {"from": "/etc", "query": {"user": "x"}}}]}}},
        {"ask": "who?"}, {"nonsense": 1}, [], "x", {"g": {"model": "m", "input": {"user": "word " * 900}}},
    ],
)  # fmt: skip
def test_what_cannot_be_run_here_is_refused(live: Live, query: object) -> None:
    response = execute(live, query)
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert "/etc/passwd" not in response.text or "root" not in response.text


def test_bodies_that_are_no_queries(live: Live) -> None:
    for body in (b"", b"{", b"\xff"):
        live.error(400, "POST", "/v1/query/execute", content=body)
