"""Bodies of requests: a wrong value at every place, and sizes of every kind.

A server answers or refuses each; it is not kept from others meanwhile, takes little memory, and says nothing to its
log. `PIC_BODY_CASES` is how many bodies are changed at random; `make fuzz` makes 5,000.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile.values import dumps, mutate_bytes, mutate_tree, places
from serve.live import NAME, QUESTION, Live, serving, tiny_model

from pictool.linker.grid import parse_policy
from pictool.serve.backends.base import BackendSettings
from pictool.store.store import Store

CASES = int(os.environ.get("PIC_BODY_CASES", "150"))
MAX_MEMORY = 512 << 20  # bytes that a body of a few MB may add
_PART = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
_COMMON = {
    "model": NAME, "max_tokens": 2, "temperature": 1, "top_p": 1, "n": 1, "seed": 3, "stop": ["x"], "stream": False,
    "stream_options": {"include_usage": True}, "pic": {"policy": "full", "recognise": True, "verify": False},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _COMMON | {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [_PART, _PART]}],
        "documents": [{"text": "a document", "title": "x"}], "logprobs": True, "top_logprobs": 2, "tools": [],
        "logit_bias": {}, "response_format": {"type": "text"}, "frequency_penalty": 0, "cache_ids": [],
    },
    "/v1/completions": _COMMON | {"prompt": [[1, 2, 3], [4]], "logprobs": 1, "echo": False, "best_of": 1},
    "/v1/caches": {"model": NAME, "text": "some text", "ttl": 5, "display_name": "x", "renew": False},
    "/v1/link": {"query": QUESTION, "documents": [{"text": "a", "source": "b"}], "policy": {"algo": "legolink", "k": 2},
                 "max_new_tokens": 2, "temperature": 1, "stop": [], "after": "head", "codec": "none"},
    "/v1/query/execute": {"g": {"model": "any", "input": {"plus": [{"user": "a"}, {"user": "b"}]}, "max_tokens": 2}},
    "/v1/messages": {
        "model": NAME, "max_tokens": 2, "temperature": 1, "top_p": 1, "stop_sequences": ["x"], "stream": False,
        "system": [_PART], "tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"}, "metadata": {"user_id": "x"}, "cache_control": {"type": "ephemeral"},
        "messages": [{"role": "user", "content": [
            _PART, {"type": "document", "source": {"type": "text", "data": "a"}, "title": "x"},
            {"type": "text", "text": "\n\n" + QUESTION}]}],
    },
    "/v1/messages/count_tokens": {"model": NAME, "system": "x", "messages": [{"role": "user", "content": QUESTION}]},
    "/v1/responses": {
        "model": NAME, "max_output_tokens": 2, "temperature": 1, "top_p": 1, "stream": False, "store": True,
        "instructions": "Be brief.", "metadata": {"a": "b"}, "include": [], "tools": [], "tool_choice": "auto",
        "text": {"format": {"type": "text"}}, "prompt_cache_options": {"mode": "explicit"}, "truncation": "disabled",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
                  {"type": "reasoning", "summary": [], "content": []},
                  {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                  {"role": "user", "content": QUESTION}],
    },
    "/v1/responses/input_tokens": {"model": NAME, "input": QUESTION, "instructions": "x"},
    f"/v1beta/models/{NAME}:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": QUESTION}]}], "systemInstruction": {"parts": [{"text": "x"}]},
        "generationConfig": {"temperature": 1, "topP": 1, "maxOutputTokens": 2, "stopSequences": ["x"], "seed": 1},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def terse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = BackendSettings(parse_policy("legolink-4"), max_tokens=2, refresh_s=3600)
    with serving(tiny_model(), Store(tmp_path_factory.mktemp("terse") / "store"), settings=settings) as live:
        yield live


def post(live: Live, path: str, data: bytes) -> httpx.Response:
    return live.client.post(path, content=data, headers={"Content-Type": "application/json"})


def require_told(response: httpx.Response, what: str) -> None:
    assert response.status_code < 500, (what, response.text)
    assert len(response.content) < 1 << 16, what
    if response.status_code != 200:
        assert response.json()["error"]["message"], what


WRONG: tuple[Any, ...] = (None, True, 0, 1, -1, 1.5, 10**400, "1", "x", [], [[]], {}, {"a": []}, [None] * 3, "\ud800")


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_type_at_every_place(terse: Live, path: str, caplog: pytest.LogCaptureFixture) -> None:
    assert post(terse, path, json.dumps(BODIES[path]).encode()).status_code == 200
    draw = random.Random(path)
    for place in places(BODIES[path]):
        for wrong in draw.sample(WRONG, 5):
            body: Any = copy.deepcopy(BODIES[path])
            holder = body
            for step in place[:-1]:
                holder = holder[step]
            if place:
                holder[place[-1]] = wrong
            require_told(post(terse, path, json.dumps(body).encode()), f"{place} = {wrong!r:.40}")
    assert not caplog.records


def test_changed_bodies_are_answered_or_refused(terse: Live, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(CASES):
        draw = random.Random(f"body {number}")
        path = draw.choice(sorted(BODIES))
        body = copy.deepcopy(BODIES[path])
        what = " and ".join(mutate_tree(body, draw) for _ in range(draw.choice((1, 1, 2, 4))))
        data = dumps(body).encode("utf-8", "surrogatepass")
        if draw.random() < 0.3:
            data, also = mutate_bytes(data, draw)
            what += also
        require_told(post(terse, path, data), f"case {number}: {path}: {what}")
    assert not caplog.records


SIZES = {
    "lists": b"[" + b"[]," * (1 << 20) + b"[]]", "objects": b"[" + b'{"a":1},' * (1 << 19) + b"1]",
    "numbers": b"[" + b"1," * (1 << 21) + b"1]", "keys": b"{" + b",".join(b'"%d":1' % i for i in range(1 << 18)) + b"}",
    "depth": b"[" * (1 << 20), "escapes": b'"' + b"\\u0041" * (1 << 19) + b'"', "digits": b"1" * (1 << 21),
    "blanks": b" " * (1 << 22), "strings": b"[" + b'"",' * (1 << 20) + b'""]', "open": b'"' + b'\\"' * (1 << 20),
}  # fmt: skip


@pytest.mark.parametrize("what", SIZES)
def test_sizes_are_bounded_in_memory_while_others_are_answered(terse: Live, what: str) -> None:
    """A field of a chat, and a whole body. What takes long here would show as an answer that never comes."""
    whole = b'{"model": "%s", "messages": %s}' % (NAME.encode(), SIZES[what])
    Path("/proc/self/clear_refs").write_text("5")
    before, is_over, answered = peak(), threading.Event(), list[int]()

    def ask() -> None:
        with terse.client_of(None) as client:
            while not is_over.is_set():
                answered.append(client.get("/health").status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for path in ("/v1/chat/completions", "/v1/query/execute"):
            require_told(post(terse, path, whole), what)
            require_told(post(terse, path, SIZES[what]), what)
    finally:
        is_over.set()
        asking.join(60)
    assert set(answered) == {200} and peak() - before < MAX_MEMORY


def peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
