"""A server with a pool on the device: answers are those without, tenants are apart, and it says what the pool did."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pictool.errors import InputError
from pictool.linker.grid import parse_policy
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store
from serve.live import DOCS, Live, serving, text_of

KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b"), "op": Tenant("operator")})
PLAIN = BackendSettings(parse_policy("legolink-4"), refresh_s=3600)
METRIC = re.compile(r"^pic_pool_(\w+?)(?:_total)? (\S+)$", re.MULTILINE)


def counts(live: Live) -> dict[str, float]:
    """What /metrics says of the pool."""
    return {name: float(value) for name, value in METRIC.findall(live.service.metrics.text().decode())}


def ask(live: Live, order: list[int], question: str, **more: Any) -> Any:
    parts = [{"type": "text", "text": DOCS[at], "cache_control": {"type": "ephemeral"}} for at in order]
    return live.chat([*parts, {"type": "text", "text": question}], **more)


def test_answers_are_those_of_a_server_without_a_pool(model: Model, tmp_path: Path) -> None:
    requests = [([0, 1, 2], "Why?"), ([2, 0, 1], "Who?"), ([1, 1], "Where?"), ([0, 1, 2], "What?"), ([2], "When?")] * 2
    size = 4 * (200 + GROWTH) * slot_bytes(model)
    with serving(model, Store(tmp_path / "store"), settings=PLAIN) as plain:
        expected = [text_of(ask(plain, *request)) for request in requests]
        queried = plain.client.post("/v1/query/execute", content=query()).json()["choices"]
        assert set(counts(plain).values()) == {0.0}
    with serving(model, Store(tmp_path / "store"), settings=replace(PLAIN, pool_bytes=size)) as live:
        with ThreadPoolExecutor(5) as threads:
            assert list(threads.map(lambda request: text_of(ask(live, *request)), requests)) == expected
        assert [ask(live, *request, pic={"verify": True})["pic"]["chunks"] for request in requests[:2]] == [3, 3]
        assert live.client.post("/v1/query/execute", content=query()).json()["choices"] == queried
        before = counts(live)
        assert 0 < before["resident_bytes"] <= size and before["moves"] > 0 and before["loaded_bytes"] > 0
        for question in ("Really?", "Is it?"):
            ask(live, [0, 1, 2], question)
        after = counts(live)
        assert after["loaded_bytes"] == before["loaded_bytes"] and after["moves"] <= before["moves"] + 6


def query() -> str:
    call = {"model": "any", "max_tokens": 4, "temperature": 0}
    inputs = [
        {"cross": [{"plus": [{"user": DOCS[at]} for at in order]}, {"user": "Why?"}]} for order in ((0, 1), (1, 0))
    ]
    return json.dumps({"par": [{"g": call | {"input": each}} for each in inputs]})


def test_no_tenant_meets_another_s_objects(model: Model, tmp_path: Path) -> None:
    """The same documents of another tenant come from the host; answers are those without a pool."""
    size = 4 * (200 + GROWTH) * slot_bytes(model)
    with serving(
        model, Store(tmp_path / "store"), KEYS, replace(PLAIN, pool_bytes=size), key="key-of-a"
    ) as live:  # fmt: skip
        loaded, texts = [0.0], []
        for key in ("key-of-a", "key-of-a", "key-of-b", "key-of-b", "key-of-a"):
            live.client = live.client_of(key)
            texts.append(text_of(ask(live, [0, 1, 2], "Why?")))
            loaded.append(counts(live)["loaded_bytes"])
        first, again, other, others_again, last = (b - a for a, b in pairwise(loaded))
        assert first == other > 0 == again == others_again == last
        assert len(set(texts)) == 1
        body = {"documents": [{"text": DOCS[0]}], "query": "Why?", "max_new_tokens": 2}
        assert '"pool"' not in live.client.post("/v1/link", json=body).text  # what others' objects make of it


def test_a_pool_that_is_too_small_for_a_prompt_answers_beside_it(model: Model, tmp_path: Path) -> None:
    small = replace(PLAIN, pool_bytes=(GROWTH + 9) * slot_bytes(model))
    with serving(model, Store(tmp_path / "store"), settings=small) as live:
        assert ask(live, [0, 1], "Why?")["pic"]["linked_tokens"] > 0
        assert counts(live)["resident_bytes"] == 0 < counts(live)["loaded_bytes"]
    with pytest.raises(InputError, match=r" 9 .* tiny.* \d+ "):
        TorchBackend(model, Store(tmp_path / "store"), replace(PLAIN, pool_bytes=9))
