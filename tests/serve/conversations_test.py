"""Conversations with a server that keeps exact prefixes: what is reused, for whom, and what is said of it."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import reference
import tiny
import torch

from pictool.core import PromptText
from pictool.errors import InputError, StoreError
from pictool.linker.grid import parse_policy
from pictool.linker.residency import ResidentObjects
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model, wrap_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.start import start_backend
from pictool.serve.tenants import Keys, Tenant
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from serve.live import DOCS, NAME, TEMPLATE, Live, serving, serving_backend, text_of, tiny_model, until

KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b"), "op": Tenant("operator")})
SETTINGS = BackendSettings(parse_policy("legolink-4"), refresh_s=3600, pool_bytes=None)
METRIC = re.compile(r"^pic_pool_(\w+) (\S+)$", re.MULTILINE)
WORDS = tiny.TEXT.split()


@pytest.fixture(scope="module")
def templated() -> Model:
    return tiny_model(TEMPLATE)


def small(model: Model, tokens: int) -> BackendSettings:
    return replace(SETTINGS, pool_bytes=tokens * slot_bytes(model))


def counts(live: Live) -> dict[str, float]:
    return {name: float(value) for name, value in METRIC.findall(live.service.metrics.text().decode())}


def send(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = {"model": NAME, "temperature": 0, "max_tokens": 8, "messages": messages} | more
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def prefix_of(answer: Any) -> int:
    return int(answer["pic"]["prefix_tokens"])


def is_idle(live: Live) -> bool:
    """Whether no image is in the pool any more; every slot is then of an object or a prefix, or free."""
    pool = live.backend._residents
    assert isinstance(pool, ResidentObjects)
    pool._settle()
    return not pool._regions and not any(piece.is_held for piece in pool._prefixes.pieces)


def test_the_next_turn_computes_only_what_is_new(templated: Model, tmp_path: Path) -> None:
    with serving(templated, Store(tmp_path / "store"), settings=SETTINGS) as live:
        messages = [{"role": "system", "content": tiny.TEXT}, {"role": "user", "content": "Why?"}]
        first = send(live.client, messages)
        assert prefix_of(first) == 0 == first["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Who?"}]
        second = send(live.client, messages)
        usage = second["usage"]
        assert prefix_of(second) == usage["prompt_tokens_details"]["cached_tokens"]
        assert prefix_of(second) >= first["usage"]["prompt_tokens"] - 16
        assert second["pic"]["exact_tokens"] == usage["prompt_tokens"]
        again = send(live.client, messages, verify=True)  # a fresh computation
        assert prefix_of(again) == 0 and again["pic"]["verify"]["same_answer"] and text_of(again) == text_of(second)
        assert counts(live)["prefix_bytes"] > 0 == counts(live)["evicted_bytes_total"]
        assert f'pic_tokens_total{{kind="prefix"}} {prefix_of(second):.1f}' in live.service.metrics.text().decode()


def test_a_linked_conversation_goes_on_and_full_never_sees_it(templated: Model, tmp_path: Path) -> None:
    with serving(templated, Store(tmp_path / "store"), settings=SETTINGS) as live:
        document = {"type": "text", "text": DOCS[0], "cache_control": {"type": "ephemeral"}}
        question = {"type": "text", "text": tiny.TEXT}
        messages: list[dict[str, Any]] = [{"role": "user", "content": [document, question]}]
        first = send(live.client, messages)
        messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Who?"}]
        exact = send(live.client, messages, pic={"policy": "full"})
        assert prefix_of(exact) == 0 and first["pic"]["chunks"] == 1
        messages[-1]["content"] = "Whom?"
        linked = send(live.client, messages)
        assert prefix_of(linked) > 0


def test_answers_are_those_of_transformers(templated: Model, tmp_path: Path) -> None:
    """Conversations of two tenants at once, in a pool that holds two of them, with clients that go away."""
    module = reference.eager(tiny.random_module(tiny.CONFIGS["llama"]()))

    def converse(live: Live, number: int) -> int:
        rng, reused = random.Random(number), 0
        client = live.client_of(("key-of-a", "key-of-b")[number % 2])
        messages = [{"role": "system", "content": " ".join(WORDS[:9])}]
        for _ in range(6):
            messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))})
            if rng.random() < 0.3:
                body = {"model": NAME, "messages": messages, "stream": True, "max_tokens": 60}
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    next(response.iter_lines())
            answer = send(client, messages, pic={"policy": "full"}, max_tokens=6)
            reused += prefix_of(answer)
            prompt = templated.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            texts.append((prompt, text_of(answer)))
            messages.append({"role": "assistant", "content": text_of(answer)})
            if len(messages) > 7:
                del messages[3:]  # another continuation
        return reused

    texts = list[tuple[str, str]]()
    with serving(
        templated, Store(tmp_path / "store"), KEYS, small(templated, 3 * (150 + GROWTH)), key="key-of-a"
    ) as live:
        with ThreadPoolExecutor(4) as threads:
            reused = sum(threads.map(lambda number: converse(live, number), range(6)))
        until(lambda: live.backend.status().active == 0)
        until(lambda: is_idle(live))
    assert reused > 0
    for prompt, text in texts:
        tokens = list(templated.encode(PromptText(prompt)))
        with torch.inference_mode():
            out = module.generate(
                torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long), do_sample=False,
                max_new_tokens=6,
            )  # fmt: skip
        assert templated.tokenizer.decode(out[0, len(tokens) :], skip_special_tokens=True) == text


def test_tenants_share_no_prefix(templated: Model, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": tiny.TEXT}]
    with serving(templated, Store(tmp_path / "store"), KEYS, SETTINGS, key="key-of-a") as live:
        found = [
            prefix_of(send(live.client_of(key), messages)) > 0 for key in ("key-of-a", "key-of-b", "op", "key-of-a")
        ]
    assert found == [False, False, False, True]


def test_blocks_of_a_client_that_vanishes_are_free(templated: Model, tmp_path: Path) -> None:
    with serving(templated, Store(tmp_path / "store"), settings=small(templated, 2 * (150 + GROWTH))) as live:
        body = {"model": NAME, "messages": [{"role": "user", "content": tiny.TEXT}], "stream": True, "max_tokens": 300}
        for _ in range(4):
            with live.client.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        until(lambda: live.backend.status().active == 0)
        until(lambda: is_idle(live))
        pool = live.backend._residents
        assert isinstance(pool, ResidentObjects)
        assert sum(piece.length for piece in pool._prefixes.pieces) <= pool.num_slots


def test_without_a_pool_nothing_is_kept(templated: Model, tmp_path: Path) -> None:
    with serving(templated, Store(tmp_path / "store"), settings=replace(SETTINGS, pool_bytes=0)) as live:
        messages = [{"role": "user", "content": tiny.TEXT}]
        assert [prefix_of(send(live.client, messages)) for _ in range(2)] == [0, 0]


def test_span_queries_and_links_reuse_them_too(templated: Model, tmp_path: Path) -> None:
    call = {"model": "any", "max_tokens": 4, "temperature": 0, "input": {"user": tiny.TEXT}}
    with serving(templated, Store(tmp_path / "store"), settings=SETTINGS) as live:
        texts = [live.client.post("/v1/query/execute", content=json.dumps({"g": call})).json() for _ in range(2)]
        assert texts[0]["choices"] == texts[1]["choices"]
        assert counts(live)["prefix_bytes"] > 0
        policy = {"algo": "full"}
        body = {"documents": [{"text": DOCS[0]}], "query": tiny.TEXT, "max_new_tokens": 2, "policy": policy}
        recomputed = []
        for compare in (False, False, True):
            events = live.client.post("/v1/link", json=body | {"compare": compare}).text
            recomputed.append(json.loads(re.findall(r"^data: (.*report.*)$", events, re.MULTILINE)[-1])["report"])
        first, second, compared = (report["tokens"]["recomputed"] for report in recomputed)
        assert second < first < compared and recomputed[2]["compare"]["same_answer"]


def test_a_model_that_can_keep_nothing_says_so(tmp_path: Path) -> None:
    module, told = tiny.random_module(tiny.CONFIGS["phi3-long"]()), list[str]()
    model = wrap_model(module, tiny.tokenizer(), NAME)
    backend = start_backend(model, Store(tmp_path / "store"), SETTINGS, None, warn=told.append)
    with serving_backend(backend, Store(tmp_path / "store")) as live:
        assert [prefix_of(live.chat(tiny.TEXT)) for _ in range(2)] == [0, 0]
    assert told == [f"{NAME}: its RoPE depends on the prompt's length, so no KV is kept from request to request"]


def said(live: Live, turns: int, key: str | None = None) -> tuple[list[dict[str, Any]], list[Any]]:
    """A conversation of so many turns, and its answers."""
    messages, answers = list[dict[str, Any]](), list[Any]()
    with live.client_of(key or live.key) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{turn} {tiny.TEXT}"})
            answers.append(send(client, messages))
            messages.append({"role": "assistant", "content": text_of(answers[-1])})
    return messages, answers


def blocks(store: Path) -> list[Path]:
    """The blocks on disk, those of one chain in their order."""
    following = dict[str | None, Path]()
    for path in (store / "prefixes").rglob("*.kvo"):
        with ObjectFile(path) as file:
            following[file.meta.parent] = path
    chain, parent = list[Path](), ""
    while parent in following:
        chain.append(following[parent])
        parent = chain[-1].stem
    assert len(chain) == len(following)
    return chain


def test_prefixes_on_disk_survive_a_restart_and_serve_their_tenant_alone(templated: Model, tmp_path: Path) -> None:
    own = replace(SETTINGS, kept_bytes=1 << 30)
    with serving(templated, Store(tmp_path / "store"), KEYS, own, key="key-of-a") as live:
        messages, before = said(live, 2)
    for key, is_found in (("key-of-a", True), ("key-of-b", False), ("key-of-a", True)):
        with serving(templated, Store(tmp_path / "store"), KEYS, own, key=key) as live:
            answer = send(live.client, [*messages, {"role": "user", "content": "Who?"}], verify=True)
            again = send(live.client, [*messages, {"role": "user", "content": "Who?"}])
            usage = before[-1]["usage"]
            whole = usage["prompt_tokens"] + usage["completion_tokens"]
            assert prefix_of(answer) == 0 and text_of(again) == text_of(answer)
            assert (prefix_of(again) >= whole - 32) == is_found and (prefix_of(again) > 0) == is_found


def test_a_damaged_block_ends_its_chain_and_is_written_again(templated: Model, tmp_path: Path) -> None:
    own, store = replace(SETTINGS, kept_bytes=1 << 30), tmp_path / "store"
    with serving(templated, Store(store), settings=own) as live:
        messages, _ = said(live, 1)
    chain = blocks(store)
    chain[5].write_bytes(chain[5].read_bytes()[:-150] + bytes(150))
    found = []
    for _ in range(2):
        warned = list[str]()
        with serving(templated, Store(store, on_warning=warned.append), settings=own) as live:
            answer = send(live.client, [*messages, {"role": "user", "content": "Who?"}])
            fresh = send(live.client, [*messages, {"role": "user", "content": "Who?"}], verify=True)
            assert text_of(answer) == text_of(fresh)
            found.append((prefix_of(answer), len(warned)))
    assert found[0] == (5 * 16, 1) and found[1][0] > 5 * 16 and found[1][1] == 0


def test_a_full_disk_and_a_small_budget_cost_no_answer(
    templated: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with serving(templated, Store(store), settings=replace(SETTINGS, kept_bytes=200_000)) as live:
        _, answers = said(live, 3)
    assert 0 < sum(path.stat().st_size for path in (store / "prefixes").rglob("*.kvo")) <= 200_000

    def full(self: Store, *_: object, **__: object) -> None:
        raise StoreError(f"{self.root}: No space left on device")

    monkeypatch.setattr(Store, "put", full)
    warned = list[str]()
    others = Store(tmp_path / "other", on_warning=warned.append)
    with serving(templated, others, settings=replace(SETTINGS, kept_bytes=1 << 30)) as live:
        assert [text_of(answer) for answer in said(live, 3)[1]] == [text_of(answer) for answer in answers]
    assert len(warned) == 3 and "a prefix is not kept" in warned[0]


def test_what_a_document_touched_is_not_on_disk(templated: Model, tmp_path: Path) -> None:
    store = tmp_path / "store"
    document = {"type": "text", "text": DOCS[0], "cache_control": {"type": "ephemeral"}}
    question = {"type": "text", "text": "Why?"}
    messages: list[dict[str, Any]] = [{"role": "system", "content": tiny.TEXT}]
    messages.append({"role": "user", "content": [document, question]})
    with serving(templated, Store(store), settings=replace(SETTINGS, kept_bytes=1 << 30)) as live:
        answer = send(live.client, messages)
        exact = answer["usage"]["prompt_tokens"] - answer["pic"]["linked_tokens"] - answer["pic"]["recomputed_tokens"]
    assert answer["pic"]["chunks"] == 1 and 0 < 16 * len(blocks(store)) < exact


def test_prefixes_on_disk_need_a_pool(templated: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--keep-prefixes: needs KV"):
        TorchBackend(templated, Store(tmp_path / "objects"), replace(SETTINGS, pool_bytes=0, kept_bytes=1))
