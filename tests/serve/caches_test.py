"""Caches as a resource, and their use in prompts: in any order and number, with system text and tools."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
import tiny

from pictool.core import Message
from pictool.engines.torch import TorchEngine
from pictool.errors import StoreError, UnwritableStoreError
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import load_model, wrap_model
from pictool.serve.service import ServiceSettings, lease_share
from pictool.serve.tenants import Keys, Tenant
from pictool.store.eviction import pinned
from pictool.store.leases import Leases, leased_keys
from pictool.store.store import Store
from pictool.store.upkeep import expire, gc
from serve.live import DOCS, NAME, QUESTION, RESPONSES, TEMPLATE, Live, serving, text_of, tiny_model

NOBODY = 65534  # a user who owns nothing
KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b"), "op": Tenant("operator")})


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with keys, whose model has a chat template."""
    store = Store(tmp_path_factory.mktemp("chatty") / "store")
    with serving(tiny_model(TEMPLATE, responses=RESPONSES), store, KEYS, key="key-of-a") as live:
        yield live


def test_a_cache_is_made_shown_listed_changed_and_ended(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(live.service, "clock", lambda: now)
    monkeypatch.setattr(live.service.leases, "_clock", lambda: now)
    made = live.ok("POST", "/v1/caches", json={"model": NAME, "text": DOCS[0], "ttl": "60s", "display_name": "book"})
    assert made["object"] == "cache" and made["status"] == "ready" and made["display_name"] == "book"
    assert made["expires_at"] - made["created_at"] == 60 and made["usage"]["total_tokens"] > 10
    path = f"/v1/caches/{made['id']}"
    assert live.ok("GET", path) == made
    longer = live.ok("PATCH", path, json={"ttl": 600})
    assert longer["expires_at"] > made["expires_at"] + 500 and live.ok("GET", path) == longer
    assert live.ok("DELETE", path) == {"id": made["id"], "object": "cache", "deleted": True}
    for method in ("GET", "DELETE"):
        live.error(404, method, path)
    live.error(404, "PATCH", path, json={"ttl": 1})


def test_lists_have_pages(live: Live) -> None:
    names = {live.cache(DOCS[i % 3]) for i in range(5)}
    seen, after = set(), ""
    while True:
        page = live.ok("GET", "/v1/caches", params={"limit": 2, "after": after})
        assert page["object"] == "list" and len(page["data"]) <= 2
        seen |= {entry["id"] for entry in page["data"]}
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert names <= seen


@pytest.mark.parametrize(
    ("status", "body", "word"),
    [
        (400, {}, "text"),
        (400, {"text": "a", "file_id": "b"}, "text"),
        (400, {"text": ""}, "empty"),
        (404, {"file_id": "file-0"}, "file"),
        (404, {"model": "other", "text": "a"}, "model"),
        (400, {"text": "a", "ttl": 9, "expires_at": 9}, "ttl"),
        (400, {"text": "a", "expires_at": 9}, "future"),
        (400, {"text": "a", "ttl": 31 * 86400}, "within"),
        (422, {"text": "a", "ttl": -1}, "ttl"),
        (422, {"text": "a", "ttl": "soon"}, "ttl"),
        (422, {"text": "a", "wish": 1}, "wish"),
        (400, {"text": "word " * 600}, "positions"),
        (400, {"messages": [{"role": "user", "content": ""}]}, "empty"),
    ],
)
def test_what_makes_no_cache_says_why(live: Live, status: int, body: dict[str, object], word: str) -> None:
    assert word in live.error(status, "POST", "/v1/caches", json={"model": NAME} | body)["message"]


def test_long_texts_and_messages_are_several_objects(live: Live) -> None:
    long = live.ok("POST", "/v1/caches", json={"model": NAME, "text": "".join(DOCS), "chunk_tokens": 32})
    assert long["usage"]["objects"] > 2
    body = {
        "model": NAME,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": DOCS[1]}],
    }
    both = live.ok("POST", "/v1/caches", json=body)
    got = live.chat(QUESTION, cache_ids=[both["id"]])
    assert got["pic"]["chunks"] == 2 and got["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "cache", "cache_id": live.cache(DOCS[1])}, {"type": "text", "text": QUESTION}],
        },
    ]
    exact = live.chat(QUESTION, cache_ids=[both["id"]], pic=False)
    assert text_of(exact) == text_of(live.chat(None, messages=messages, pic=False))
    assert live.chat(QUESTION, cache_ids=[long["id"]])["pic"]["chunks"] == long["usage"]["objects"]


def test_caches_are_used_in_any_order_and_number(live: Live, tmp_path: Path) -> None:
    names = [live.cache(doc) for doc in DOCS]
    engine = TorchEngine(live.backend.engine_of(Tenant("default")).model, Store(tmp_path / "own"))
    for order in ([2, 0], [1, 1, 0, 2], [0]):
        files = []
        for i in order:
            files.append(tmp_path / f"{i}.txt")
            files[-1].write_text(DOCS[i])
        spec = Spec(QUESTION, files, parse_policy("naive"), max_new_tokens=8)
        got = live.chat(QUESTION, cache_ids=[names[i] for i in order], pic={"policy": "naive"})
        assert text_of(got).strip() == engine.answer(spec).text and got["pic"]["chunks"] == len(order)


def test_with_a_chat_template_system_text_and_tools(chatty: Live, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(DOCS[0])
    (tmp_path / "b.txt").write_text(DOCS[1])
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    parts = [{"type": "cache", "cache_id": chatty.cache(doc)} for doc in DOCS[:2]]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]},
    ]  # fmt: skip
    spec = Spec(
        documents=[tmp_path / "a.txt", tmp_path / "b.txt"], policy=parse_policy("legolink-4"), max_new_tokens=8,
        messages=(
            Message("system", "Be brief."), Message("user", "Hello."), Message("assistant", "Hello."),
            Message("user", QUESTION),
        ),
    )  # fmt: skip
    engine = TorchEngine(tiny_model(TEMPLATE), Store(tmp_path / "other"))
    got = chatty.chat(None, messages=messages)
    assert text_of(got).strip() == engine.answer(spec).text
    assert got["usage"]["prompt_tokens"] == engine.link(spec).layout.num_tokens
    with_tools = chatty.chat(None, messages=messages, tools=tools)
    assert with_tools["usage"]["prompt_tokens"] > got["usage"]["prompt_tokens"]
    assert with_tools["pic"]["chunks"] == 2
    assert chatty.chat(None, messages=messages, tools=tools, tool_choice="none")["usage"] == got["usage"]


def test_leases_hold_objects_until_the_last_ends(live: Live) -> None:
    text = DOCS[0] + "This one is of its own."
    first, second = live.cache(text), live.cache(text)
    lease = live.service.leases.find(first, Tenant("default").id)
    assert lease is not None
    (entry,) = lease.objects
    assert not pinned(live.store.root) and entry.key in leased_keys(live.store.root)
    live.ok("DELETE", f"/v1/caches/{first}")
    gc(live.store, 1)
    assert live.store.path(entry.key).exists() and live.chat(QUESTION, cache_ids=[second])["pic"]["chunks"] == 1
    live.ok("DELETE", f"/v1/caches/{second}")
    assert live.store.path(entry.key).exists(), "space is not needed yet"
    gc(live.store, 1)
    assert not live.store.path(entry.key).exists()


def test_a_cache_whose_object_was_removed_by_force_is_gone(live: Live) -> None:
    name = live.cache(DOCS[2] + "Force.")
    lease = live.service.leases.find(name, Tenant("default").id)
    assert lease is not None
    expire(live.store, [lease.objects[0].key], force=True)
    assert live.ok("GET", f"/v1/caches/{name}")["status"] == "gone"
    body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "cache_ids": [name]}
    assert "create the cache again" in live.error(404, "POST", "/v1/chat/completions", json=body)["message"]


def test_a_cache_of_another_model_is_gone(tmp_path: Path) -> None:
    """The store outlives the server; under the same name the next one serves other weights."""
    store = Store(tmp_path / "store")
    with serving(tiny_model(), store) as live:
        name = live.cache(DOCS[0])
        assert live.ok("GET", f"/v1/caches/{name}")["status"] == "ready"
    other = wrap_model(tiny.random_module(tiny.CONFIGS["llama"](), seed=9), tiny.tokenizer(), NAME)
    with serving(other, store) as live:
        assert live.ok("GET", f"/v1/caches/{name}")["status"] == "gone"
        body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "cache_ids": [name]}
        assert live.error(404, "POST", "/v1/chat/completions", json=body)["code"] == "cache_object_missing"


def test_weights_that_change_in_place_are_the_server_s_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())
    model = load_model(str(directory), "cpu")
    with serving(model, Store(tmp_path / "store")) as live:
        weights = directory / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        body = {"model": live.backend.model, "text": DOCS[0]}
        answer = live.client.post("/v1/caches", json=body)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "model"
        assert weights.name not in answer.text
    assert str(weights) in caplog.text


def test_a_damaged_object_is_never_linked(live: Live) -> None:
    text = DOCS[1] + "Damage."
    name, want = live.cache(text), text_of(live.chat(text + "\n\n" + QUESTION, pic=False))
    lease = live.service.leases.find(name, Tenant("default").id)
    assert lease is not None
    path = live.store.path(lease.objects[0].key)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(bytes(data))
    got = live.chat(QUESTION, cache_ids=[name])
    assert got["pic"]["policy"] == "full" and got["pic"]["problem"] and got["pic"]["linked_tokens"] == 0
    assert text_of(got) == text_of(live.chat(QUESTION, cache_ids=[name], pic=False))
    assert want
    path.unlink()


class Clock:
    now = 1e6

    def __call__(self) -> float:
        return self.now


def test_caches_expire_on_time_and_renew_when_they_are_used(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "objects"), service_settings=ServiceSettings(default_ttl_s=10)) as live:
        clock = Clock()
        live.service.clock = live.service.leases._clock = clock
        fixed, renewing = live.cache(DOCS[0]), live.cache(DOCS[0], renew=True)
        clock.now += 6
        live.chat(QUESTION, cache_ids=[fixed, renewing])
        clock.now += 6
        live.chat(QUESTION, cache_ids=[renewing])
        body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "cache_ids": [fixed]}
        live.error(404, "POST", "/v1/chat/completions", json=body)
        assert [entry["id"] for entry in live.ok("GET", "/v1/caches")["data"]] == [renewing]


# Tenants


def other(live: Live) -> httpx.Client:
    return live.client_of("key-of-b")


def test_another_keys_things_do_not_exist(chatty: Live) -> None:
    name = chatty.cache(DOCS[0])
    file = chatty.ok("POST", "/v1/files", files={"file": ("a.txt", DOCS[0].encode())})["id"]
    absent = "cache-" + "0" * 32
    with other(chatty) as b:
        for path, missing in (
            (f"/v1/caches/{name}", f"/v1/caches/{absent}"),
            (f"/v1/files/{file}", "/v1/files/file-0"),
        ):
            for method in ("GET", "DELETE"):
                answers = [b.request(method, each) for each in (path, missing)]
                assert [answer.status_code for answer in answers] == [404, 404]
        assert b.get("/v1/caches").json()["data"] == [] and b.get("/v1/files").json()["data"] == []
        assert b.get("/v1/caches", params={"after": name}).json()["data"] == []
        body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "cache_ids": [name]}
        assert b.post("/v1/chat/completions", json=body).status_code == 404
        assert b.patch(f"/v1/caches/{name}", json={"ttl": 5}).status_code == 404
        assert b.get(f"/v1beta/cachedContents/{name}").status_code == 404
    assert chatty.ok("GET", f"/v1/caches/{name}")["status"] == "ready"


def test_what_others_compiled_is_neither_recognised_nor_counted(chatty: Live) -> None:
    chatty.cache(DOCS[2])
    chatty.backend.index.refresh()
    body = {"model": NAME, "temperature": 0, "max_tokens": 4}
    body |= {"messages": [{"role": "user", "content": DOCS[2] + QUESTION}]}
    mine = chatty.ok("POST", "/v1/chat/completions", json=body)
    assert mine["pic"]["source"] == "recognised"
    with other(chatty) as b:
        theirs = b.post("/v1/chat/completions", json=body).json()
        assert theirs["pic"]["source"] == "none" and theirs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        made = [
            client.post("/v1/caches", json={"model": NAME, "text": DOCS[2]}).json() for client in (b, chatty.client)
        ]
        assert made[0]["usage"] == made[1]["usage"]


def test_the_chains_of_prefixes_are_a_tenants_own(chatty: Live) -> None:
    """Under `prefix` what one tenant computed counts as cached for that tenant alone, however often others ask."""
    long = " ".join(DOCS) + " All of this is said once, and by one of them."
    body = {"model": NAME, "temperature": 0, "max_tokens": 2, "pic": {"policy": "prefix"}}
    body |= {"messages": [{"role": "user", "content": f"{long}\n\n{QUESTION}"}]}

    def cached(client: httpx.Client) -> int:
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    with other(chatty) as b:
        assert [cached(chatty.client), cached(b)] == [0, 0]
        assert cached(chatty.client) == cached(b) > 32


def test_keys_are_required_where_there_are_some(chatty: Live) -> None:
    for key in (None, "key-of-c"):
        with chatty.client_of(key) as stranger:
            for path in ("/v1/models", "/v1/caches", "/v1/files", "/metrics", "/v1beta/models"):
                response = stranger.get(path)
                assert response.status_code == 401 and response.json()["error"]["message"]
            assert stranger.get("/health").status_code == 200
    assert chatty.client.get("/metrics").status_code == 403
    with chatty.client_of("op") as operator:
        assert "pic_tokens_total" in operator.get("/metrics").text


@pytest.mark.parametrize("content", [b"no database at all, and longer than a header of sqlite is" * 9, None])
def test_a_server_with_damaged_leases_does_not_start(tmp_path: Path, content: bytes | None) -> None:
    store = Store(tmp_path / "store")
    store.ensure_store()
    if content is None:
        (store.root / "store.sqlite3").mkdir()
    else:
        (store.root / "store.sqlite3").write_bytes(content)
    with pytest.raises(StoreError, match=r"store\.sqlite3: "), serving(tiny_model(), store):
        pass


def test_a_tenant_caches_its_share_and_the_others_notice_nothing(tmp_path: Path) -> None:
    """Where one's caches are full, it is told so; another's caches and documents are kept as before."""
    with serving(tiny_model(), Store(tmp_path / "sized")) as live:
        live.cache(DOCS[0])
        size = sum(path.stat().st_size for path in live.store.root.rglob("*.kvo"))
    store = Store(tmp_path / "store", max_bytes=8 * size)
    share = lease_share(store.max_bytes, KEYS)
    assert share == 2 * size, "three tenants of three quarters"
    service = ServiceSettings(lease_bytes=share)
    with serving(tiny_model(), store, KEYS, service_settings=service, key="key-of-a") as live, other(live) as b:
        texts = [f"{doc}{i}" for i in range(2) for doc in DOCS]
        made = [
            live.client.post("/v1/caches", json={"model": NAME, "text": text}).status_code for text in texts
        ]  # fmt: skip
        assert set(made) == {200, 429} and made.count(200) <= 3
        error = live.error(429, "POST", "/v1/caches", json={"model": NAME, "text": texts[-1]})
        assert error["code"] == "insufficient_quota" and "your caches" in error["message"]
        gemini = {"model": NAME, "contents": [{"parts": [{"text": texts[-1]}]}]}
        assert live.error(429, "POST", "/v1beta/cachedContents", json=gemini)["status"] == "RESOURCE_EXHAUSTED"
        assert b.post("/v1/caches", json={"model": NAME, "text": texts[0]}).status_code == 200
        part = {"type": "document", "text": texts[1]}
        ask = {"model": NAME, "messages": [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]}
        answer = b.post("/v1/chat/completions", json=ask).json()
        assert answer["pic"]["source"] == "marker" and "problem" not in answer["pic"]
        oldest = live.ok("GET", "/v1/caches")["data"][-1]["id"]
        live.ok("DELETE", f"/v1/caches/{oldest}")
        live.cache(texts[0])


@pytest.mark.parametrize("policy", ["legolink-4", "full", "prefix"])
def test_where_nothing_can_be_written_answers_are_exact_and_caches_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A full disk: texts with markers are computed, caches that last longer with use are used, and can be ended."""
    part = {"type": "text", "text": DOCS[0], "cache_control": {"type": "ephemeral"}}
    parts, more = [part, {"type": "text", "text": QUESTION}], {"pic": {"policy": policy}}
    with serving(tiny_model(), Store(tmp_path / "store")) as live:
        exact = text_of(live.chat(parts, pic={"policy": "full"}))
        name = live.cache(DOCS[1], renew=True)
        cached = text_of(live.chat(QUESTION, cache_ids=[name], **more))

        def full(self: Store, *_: object, **__: object) -> None:
            raise UnwritableStoreError(f"{self.root}: cannot be written (No space left on device)")

        def unwritable(*_: object) -> None:
            raise StoreError("store.sqlite3: cannot be used now (database or disk is full)")

        monkeypatch.setattr(Store, "put", full)
        monkeypatch.setattr(Leases, "extend", unwritable)
        answered = live.chat(parts, **more)
        assert text_of(answered) == exact and answered["pic"]["linked_tokens"] == 0
        assert ("problem" in answered["pic"]) == (policy == "legolink-4")
        assert text_of(live.chat(QUESTION, cache_ids=[name], **more)) == cached
        live.error(503, "POST", "/v1/caches", json={"model": NAME, "text": "New. " + DOCS[0]})
        live.ok("DELETE", f"/v1/caches/{name}")


@contextmanager
def read_only(store: Store) -> Iterator[None]:
    """A store that this process may read and not write; root, which may, is somebody else meanwhile."""
    paths = [store.root, *store.root.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    own = os.geteuid()
    try:
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        if own == 0:
            os.seteuid(NOBODY)
        yield
    finally:
        os.seteuid(own)
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that everybody may enter, as those of pytest are not."""
    with TemporaryDirectory(prefix="pic-read-only-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_read_only_store_is_served(open_path: Path) -> None:
    """Its caches are used as before; those that are not there are not found; what has to be written says so."""
    ask = {"model": NAME, "text": "New. " + DOCS[1]}
    with serving(tiny_model(), Store(open_path / "store")) as live:
        for renews in (False, True):
            name = live.cache(DOCS[0], renew=renews)
            answer = text_of(live.chat(QUESTION, cache_ids=[name]))
            with read_only(live.store):
                again = live.chat(QUESTION, cache_ids=[name])
                assert text_of(again) == answer and again["pic"]["linked_tokens"] > 0
                assert live.ok("GET", f"/v1/caches/{name}")["status"] == "ready"
                assert "cannot be written" in live.error(503, "POST", "/v1/caches", json=ask)["message"]
                assert live.error(503, "DELETE", f"/v1/caches/{name}")["code"] == "store"
        live.ok("DELETE", f"/v1/caches/{name}")


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_read_only_store_without_leases_is_served(open_path: Path, is_empty: bool) -> None:
    store = Store(open_path / "store")
    store.ensure_store()
    if not is_empty:
        (store.root / "store.sqlite3").touch()  # as a process leaves it that is killed while it makes it
    unknown = f"cache-{'0' * 32}"
    body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "cache_ids": [unknown]}
    with serving(tiny_model(), store) as live, read_only(store):
        assert live.error(404, "POST", "/v1/chat/completions", json=body)["code"] == "cache_not_found"
        for method, more in (("GET", {}), ("DELETE", {}), ("PATCH", {"json": {"ttl": 5}})):
            live.error(404, method, f"/v1/caches/{unknown}", **more)
        assert live.ok("GET", "/v1/caches")["data"] == []
        assert "pic_leases 0.0" in live.client.get("/metrics").text
        assert text_of(live.chat(QUESTION)) is not None
