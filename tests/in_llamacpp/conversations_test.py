"""Conversations with `pic serve -m FILE.gguf`: what is reused, and answers against a server that keeps nothing."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import httpx
import pytest
import tiny
from commands.run import pic
from serve.conversations_test import KEYS, SETTINGS, WORDS, blocks, counts, prefix_of, said, send
from serve.live import DOCS, serving, text_of, until

from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.errors import StoreError
from pictool.runtime.model import Model
from pictool.store.store import Store

DISK = replace(SETTINGS, kept_bytes=1 << 30)
NOTHING = replace(SETTINGS, pool_bytes=0)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> GgufModel:
    return open_gguf(str(tiny_gguf), dtype="float32")


@pytest.fixture(scope="module")
def other_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "other.gguf"
    module = gguf_files.random_module("gemma3", seed=3)
    return gguf_files.write_gguf(path, module, tiny.tokenizer(), template=gguf_files.TEMPLATE)


def test_the_next_turn_computes_only_what_is_new(model: Model, tmp_path: Path) -> None:
    with serving(model, Store(tmp_path / "store"), settings=SETTINGS) as live:
        _, (first, second) = said(live, 2)
        usage = second["usage"]
        assert prefix_of(first) == 0 < usage["prompt_tokens_details"]["cached_tokens"] == prefix_of(second)
        whole = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert prefix_of(second) >= whole - 32 and second["pic"]["exact_tokens"] == usage["prompt_tokens"]
        assert counts(live)["prefix_bytes"] > 0
        assert f'pic_tokens_total{{kind="prefix"}} {prefix_of(second):.1f}' in live.service.metrics.text().decode()


def test_answers_are_those_of_a_server_that_keeps_nothing(model: Model, tmp_path: Path) -> None:
    """Conversations of two tenants at once, linked documents among them, with clients that go away."""
    texts = list[tuple[list[dict[str, Any]], str]]()

    def converse(live: Any, number: int) -> int:
        rng, reused = random.Random(number), 0
        client = live.client_of(("key-of-a", "key-of-b")[number % 2])
        document = {"type": "text", "text": DOCS[number % 3], "cache_control": {"type": "ephemeral"}}
        messages: list[dict[str, Any]] = [{"role": "system", "content": " ".join(WORDS[:9])}]
        for turn in range(6):
            question = {"type": "text", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))}
            messages.append({"role": "user", "content": [document, question] if turn == number % 4 else [question]})
            if rng.random() < 0.3:
                body = {"model": live.backend.model, "messages": messages, "stream": True, "max_tokens": 60}
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    next(response.iter_lines())
            answer = send(client, messages, model=live.backend.model)
            reused += prefix_of(answer)
            texts.append(([*messages], text_of(answer)))
            messages.append({"role": "assistant", "content": text_of(answer)})
            if len(messages) > 9:
                del messages[5:]  # another continuation
        return reused

    with serving(model, Store(tmp_path / "store"), KEYS, SETTINGS, key="key-of-a") as live:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(lambda number: converse(live, number), range(6))) > 0
        until(lambda: live.backend.status().active == 0)
    with serving(model, Store(tmp_path / "fresh"), settings=NOTHING) as live:
        for messages, text in texts:
            answer = send(live.client, messages, model=live.backend.model)
            assert prefix_of(answer) == 0 and text_of(answer) == text


def test_prefixes_on_disk_outlive_restarts_and_other_models(model: Model, other_gguf: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serving(model, Store(store), KEYS, DISK, key="key-of-a") as live:
        messages, _ = said(live, 2)
    other = open_gguf(str(other_gguf), dtype="float32")
    for each, key, is_found in ((other, "key-of-a", False), (model, "key-of-b", False), (model, "key-of-a", True)):
        with serving(each, Store(store), KEYS, DISK, key=key) as live:
            asked = [*messages, {"role": "user", "content": "Who?"}]
            answer = send(live.client, asked, model=live.backend.model)
            fresh = send(live.client, asked, model=live.backend.model, verify=True)
            assert (prefix_of(answer) > 0) == is_found and text_of(answer) == text_of(fresh)


def test_a_damaged_block_ends_its_chain_and_a_full_disk_costs_no_answer(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, warned = tmp_path / "store", list[str]()
    with serving(model, Store(store), settings=DISK) as live:
        messages, answers = said(live, 1)
    chain = blocks(store)
    chain[2].write_bytes(chain[2].read_bytes()[:-150] + bytes(150))
    with serving(model, Store(store, on_warning=warned.append), settings=DISK) as live:
        answer = send(live.client, messages[:1])
        assert prefix_of(answer) == 32 and text_of(answer) == text_of(answers[0]) and len(warned) == 1

    def full(self: Store, *_: object, **__: object) -> None:
        raise StoreError(f"{self.root}: No space left on device")

    monkeypatch.setattr(Store, "put", full)
    with serving(model, Store(tmp_path / "other", on_warning=warned.append), settings=DISK) as live:
        assert text_of(said(live, 1)[1][0]) == text_of(answers[0]) and "a prefix is not kept" in warned[-1]


@contextmanager
def started(path: Path, store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [
        sys.executable,
        "-m",
        "pictool",
        "serve",
        "-m",
        str(path),
        "--port",
        "0",
        "--store",
        str(store),
        *options,
    ]
    with subprocess.Popen([*command, "--check", "off"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = (re.search(r"on (http://\S+)/v1", line) for line in process.stderr)
        address = next(each for each in found if each)
        with httpx.Client(base_url=address[1], timeout=60) as client:
            yield process, client
        process.kill()


def test_a_server_that_is_killed_at_any_moment_starts_again_and_answers_the_same(
    embedded_gguf: Path, tmp_path: Path
) -> None:
    rng, store = random.Random(1), tmp_path / "store"
    messages = [{"role": "user", "content": "The harbour holds a festival. " * 12 + "Who?"}]

    def ask(client: httpx.Client) -> Any:
        name = client.get("/v1/models").json()["data"][0]["id"]
        return send(client, messages, model=name, max_tokens=16)

    with started(embedded_gguf, tmp_path / "fresh", "--pool", "0") as (_, client):
        expected = text_of(ask(client))
    found = list[int]()
    for turn in range(4):
        with started(embedded_gguf, store, "--keep-prefixes", "1G") as (process, client):
            if turn < 3:
                with ThreadPoolExecutor(1) as threads, suppress(httpx.HTTPError):
                    asked = threads.submit(ask, client)
                    time.sleep(rng.uniform(0, 0.3))
                    process.send_signal(signal.SIGKILL)
                    asked.result()
            else:
                for _ in range(2):
                    answer = ask(client)
                    assert text_of(answer) == expected
                    found.append(prefix_of(answer))
    assert found[1] > 0 and pic("store", "verify", "--store", store).code == 0
