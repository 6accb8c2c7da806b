"""The backend that fronts servers elsewhere, over one that answers as vLLM does: the torch backend says the same."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from pictool.engines.base import Comparison
from pictool.engines.vllm.request import SECRET
from pictool.errors import InputError
from pictool.fidelity.divergence import Divergence
from pictool.linker.grid import parse_policy
from pictool.routing import Residency
from pictool.runtime.model import Model, load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.upstream.backend import UpstreamBackend
from pictool.serve.backends.upstream.engine import coarse_kl
from pictool.serve.start import start_upstream
from pictool.store.store import Store
from serve.fake_vllm import FakeVllm, fake_vllm
from serve.live import DOCS, KEYS, NAME, TEMPLATE, Live, serving, serving_backend, text_of, until

QUESTION = "Really?"
SETTINGS = BackendSettings(parse_policy("legolink-4"), min_tokens=8, refresh_s=3600, name=NAME)
TEXTS = [f"{doc}It is page {i}, and it is read by nobody at all." for i, doc in enumerate(DOCS)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save_model(tmp_path_factory.mktemp("model"), tiny.CONFIGS["llama"]())
    tokenizer = tiny.tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    tokenizer.save_pretrained(path)
    tokenizer.chat_template = template
    return path


def opened(directory: Path) -> Model:
    return load_model(str(directory), "cpu", "float32")


@pytest.fixture(scope="module")
def fakes(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FakeVllm]]:
    """Two servers over one store."""
    root = tmp_path_factory.mktemp("served") / "store"
    with fake_vllm(opened(directory), Store(root)) as first, fake_vllm(opened(directory), Store(root)) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def router(directory: Path, fakes: list[FakeVllm]) -> Iterator[Live]:
    """The router of both, for the tenant a."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "shared")
        store = Store(fakes[0].store.root)
        backend = start_upstream(opened(directory), store, SETTINGS, [fake.url for fake in fakes], 9.0, True)
        with serving_backend(backend, store, KEYS, key="key-of-a") as live:
            yield live


@pytest.fixture(scope="module")
def torch_server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    store = Store(tmp_path_factory.mktemp("torch") / "store")
    with serving(opened(directory), store, KEYS, SETTINGS, key="key-of-a") as live:
        yield live


@pytest.fixture(autouse=True)
def _well(fakes: list[FakeVllm], router: Live) -> Iterator[None]:
    """Each test begins with servers that are well."""
    yield
    for fake in fakes:
        fake.bodies.clear()
        fake.status, fake.error, fake.breaks, fake.ends_with, fake.delay_s = 200, None, False, None, 0.0
        fake.keeps_reports = True
    backend: Any = router.backend
    replicas = backend._replicas
    replicas._residency = Residency()
    replicas._residency.keep(replicas._replicas)
    for replica in replicas._replicas.values():
        replica.resumes = 0.0


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def parts(live: Live, *texts: str) -> list[dict[str, Any]]:
    caches: list[dict[str, Any]] = [{"type": "cache", "cache_id": live.cache(text)} for text in texts]
    return [*caches, {"type": "text", "text": QUESTION}]


def logprobs_of(response: Any) -> list[float]:
    return [token["logprob"] for token in response["choices"][0]["logprobs"]["content"]]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    "caches": {"content": "CACHES", "logprobs": True, "top_logprobs": 3},
    "marked": {"content": [{"type": "document", "text": TEXTS[1] + " Marked."}, {"type": "text", "text": QUESTION}]},
    "pasted": {"content": f"Read <doc>{TEXTS[0]}</doc> {QUESTION}", "pic": {"explain": True}},
    "policy": {"content": "CACHES", "pic": {"policy": "naive"}},
    "exact": {"content": "CACHES", "pic": False},
    "nothing": {"content": "Why is nothing here?"},
    "sampled": {"content": "CACHES", "temperature": 0.9, "seed": 7, "n": 2, "top_p": 0.9},
    "n at temperature 0": {"content": "CACHES", "n": 2},
    "penalties": {"content": "CACHES", "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"9": 2}},
    "structure": {"content": "CACHES", "response_format": SCHEMA},
    "verified": {"content": "CACHES", "verify": True, "temperature": 0.7, "seed": 1},
}


@pytest.mark.parametrize("name", list(BODIES))
def test_both_backends_say_the_same(router: Live, torch_server: Live, name: str) -> None:
    answers = []
    for live in (router, torch_server):
        backend: Any = live.backend
        fields = dict(BODIES[name])
        content = fields.pop("content")
        filled = parts(live, *TEXTS)
        backend.index.refresh()
        answers.append(live.chat(filled if content == "CACHES" else content, **fields))
    got, want = answers
    assert [c["message"]["content"] for c in got["choices"]] == [c["message"]["content"] for c in want["choices"]]
    assert [c["finish_reason"] for c in got["choices"]] == [c["finish_reason"] for c in want["choices"]]
    verified = [answer["pic"].pop("verify", None) for answer in answers]
    assert got["pic"] == want["pic"]
    assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    assert got["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
    if "logprobs" in BODIES[name]:
        assert logprobs_of(got) == pytest.approx(logprobs_of(want), abs=1e-4)
        assert [t["top_logprobs"][0]["token"] for t in got["choices"][0]["logprobs"]["content"]] == [
            t["top_logprobs"][0]["token"] for t in want["choices"][0]["logprobs"]["content"]
        ]
    if verified[0] is not None:
        assert verified[0]["answer"] == verified[1]["answer"] and 0 <= verified[0]["kl"] <= verified[1]["kl"] + 1e-5


def test_a_stop_string_ends_an_answer_whose_link_is_reported(router: Live) -> None:
    content = parts(router, *TEXTS)
    stop = text_of(router.chat(content))[2:5]
    said = router.chat(content, stop=[stop])
    assert said["choices"][0]["finish_reason"] == "stop" and stop not in text_of(said)
    assert said["pic"]["chunks"] == len(TEXTS) and "problem" not in said["pic"]


def test_another_route_streams_the_same(router: Live) -> None:
    content = parts(router, *TEXTS)
    whole = router.chat(content)
    body = {"model": NAME, "temperature": 0, "max_tokens": 8, "stream": True, "messages": user(content)}
    with router.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == text_of(whole) and [chunk["pic"] for chunk in chunks if "pic" in chunk] == [whole["pic"]]


def test_what_a_server_is_asked_for_is_all_said(router: Live, fakes: list[FakeVllm]) -> None:
    """No default of a server's own directory changes an answer; and no salt of a tenant goes where vLLM shows it."""
    router.chat(parts(router, *TEXTS))
    body = next(body for fake in fakes for body in fake.bodies if "chunks" in (body["kv_transfer_params"]["pic"] or {}))
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)
    assert body["cache_salt"] != "salt of a" and len(body["cache_salt"]) == 64
    assert body["kv_transfer_params"]["pic"]["salt"] == "salt of a"
    assert body["model"] == "served-by-vllm" and all(isinstance(token, int) for token in body["prompt"])


def test_a_request_goes_to_the_server_that_has_its_objects(router: Live, fakes: list[FakeVllm]) -> None:
    content = parts(router, f"{TEXTS[0]} Where does it live?")
    for _ in range(4):
        router.chat(content)
    counts = [sum("chunks" in (b["kv_transfer_params"]["pic"] or {}) for b in fake.bodies) for fake in fakes]
    assert sorted(counts) == [0, 4]


def holder(router: Live, fakes: list[FakeVllm], content: Any) -> tuple[FakeVllm, FakeVllm]:
    """The server that answers a request, and the other one."""
    for fake in fakes:
        fake.bodies.clear()
    router.chat(content)
    first, second = fakes
    return (first, second) if first.bodies else (second, first)


@pytest.mark.parametrize("status", [500, 503, 429, 401])
def test_a_server_that_fails_is_left_out_and_tried_again(router: Live, fakes: list[FakeVllm], status: int) -> None:
    content = parts(router, TEXTS[0])
    want = text_of(router.chat(content))
    failing, other = holder(router, fakes, content)
    failing.status = status
    assert text_of(router.chat(content)) == want and len(other.bodies) == 1
    num_refused = len(failing.bodies)
    assert text_of(router.chat(content)) == want and len(failing.bodies) == num_refused
    failing.status, other.status = 200, status
    assert text_of(router.chat(content)) == want and len(failing.bodies) == num_refused + 1


def test_no_server_answers(router: Live, fakes: list[FakeVllm]) -> None:
    for fake in fakes:
        fake.status = 500
    error = router.error(503, "POST", "/v1/chat/completions", json={"model": NAME, "messages": user("Why?")})
    assert error["code"] == "no_upstream"
    assert router.ok("GET", "/health")["status"] == "ok"


@pytest.mark.parametrize("breaks", [{"breaks": True}, {"error": 500}, {"ends_with": "abort"}])
def test_an_answer_that_breaks_off_is_an_error(router: Live, fakes: list[FakeVllm], breaks: dict[str, Any]) -> None:
    for fake in fakes:
        vars(fake).update(breaks)
    error = router.error(503, "POST", "/v1/chat/completions", json={"model": NAME, "messages": user("Why?")})
    assert error["code"] == "upstream_lost"


@pytest.mark.parametrize("fails", [{"status": 400}, {"error": 400}])
def test_a_clients_mistake_is_the_clients(router: Live, fakes: list[FakeVllm], fails: dict[str, Any]) -> None:
    for fake in fakes:
        vars(fake).update(fails)
    error = router.error(400, "POST", "/v1/chat/completions", json={"model": NAME, "messages": user("Why?")})
    assert error["message"] in ("it is refused", "no room")
    assert sum(len(fake.bodies) for fake in fakes) == 1


def test_a_client_that_vanishes_ends_its_request(router: Live, fakes: list[FakeVllm]) -> None:
    for fake in fakes:
        fake.delay_s = 0.05
    body = {"model": NAME, "max_tokens": 400, "stream": True, "messages": user("Why?"), "logit_bias": {"5": -100}}
    with router.client.stream("POST", "/v1/chat/completions", json=body) as response:
        until(lambda: any(fake.num_running for fake in fakes))
        next(response.iter_lines())
    until(lambda: not any(fake.num_running for fake in fakes))
    until(lambda: router.backend.status().active == 0)


def test_a_link_without_a_report_is_said_to_have_none(router: Live, fakes: list[FakeVllm]) -> None:
    for fake in fakes:
        fake.keeps_reports = False
    said = router.chat(parts(router, TEXTS[0]))["pic"]
    assert said["policy"] == "full" and said["problem"]


def test_tenants_are_apart(router: Live) -> None:
    content = parts(router, TEXTS[0])
    with router.client_of("key-of-b") as other:
        body = {"model": NAME, "messages": user(content)}
        assert other.post("/v1/chat/completions", json=body).status_code == 404
        pasted = other.post("/v1/chat/completions", json={"model": NAME, "messages": user(f"{TEXTS[0]} {QUESTION}")})
    assert pasted.json()["pic"]["chunks"] == 0


def test_links_and_queries_run(router: Live, torch_server: Live) -> None:
    body = {"query": QUESTION, "documents": [{"text": TEXTS[2]}], "policy": {"algo": "naive"}, "max_new_tokens": 6}
    call = {"model": "spnl/any", "input": {"user": f"{TEXTS[0]} {QUESTION}"}, "max_tokens": 6, "temperature": 0}
    said = list[tuple[Any, ...]]()
    for live in (router, torch_server):
        lines = live.client.post("/v1/link", json=body | {"compare": True}).text.split("\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        report = events[-1]["report"]
        kept = {name: report[name] for name in ("answer", "algo", "params")}
        said.append((kept, report["tokens"]["recomputed"], report["compare"]["same_answer"]))
        answered = live.client.post("/v1/query/execute", json={"g": call})
        assert answered.status_code == 200, answered.text
        said[-1] += (answered.json()["choices"],)
    assert said[0] == said[1]


def test_without_the_secret_nothing_is_compiled(router: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.serve.backends.upstream.engine.compile_proof", lambda *_: "another")
    body = {"model": NAME, "text": f"{TEXTS[0]} Nobody compiles it."}
    assert "compile: disabled" in router.error(400, "POST", "/v1/caches", json=body)["message"]


def test_servers_that_cannot_be_fronted_are_refused(directory: Path, fakes: list[FakeVllm], tmp_path: Path) -> None:
    backend = UpstreamBackend(opened(directory), Store(tmp_path / "store"), SETTINGS, ["http://127.0.0.1:9"])
    with pytest.raises(InputError, match=r"http://127.0.0.1:9"):
        asyncio.run(backend.start(None, False))
    fakes[0].has_connector = False
    backend = UpstreamBackend(opened(directory), Store(tmp_path / "store"), SETTINGS, [fakes[0].url])
    with pytest.raises(InputError, match="PicConnector"):
        asyncio.run(backend.start(None, False))
    fakes[0].has_connector = True


def test_the_divergence_over_likely_tokens_is_at_most_that_over_all() -> None:
    full, linked = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.1, 0.2]
    logs = [{i: math.log(value) for i, value in enumerate(values)} for values in (full, linked)]
    exact = sum(p * math.log(p / q) for p, q in zip(full, linked, strict=True))
    assert coarse_kl(*logs) == pytest.approx(exact)
    few = {token: logs[0][token] for token in (0, 1)}
    assert 0 < coarse_kl(few, logs[1]) < exact and coarse_kl(few, logs[0]) == pytest.approx(0, abs=1e-9)


def test_the_check_compares_first_tokens_and_leaves_no_object(directory: Path, fakes: list[FakeVllm]) -> None:
    store = Store(fakes[0].store.root)
    before = set(store.keys())
    backend = start_upstream(opened(directory), store, SETTINGS, [fakes[0].url], 2.0)
    assert backend.problem is None and backend.status().divergence["legolink-4"] > 0
    assert set(store.keys()) == before
    backend.close()


def test_a_model_that_does_not_take_linking_answers_exactly(
    directory: Path, fakes: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(limit: float, refuses: bool) -> UpstreamBackend:
        store = Store(fakes[0].store.root)
        return start_upstream(opened(directory), store, SETTINGS, [fakes[0].url], limit, refuses)

    monkeypatch.setattr(UpstreamBackend, "_measure", lambda _: measured())

    async def measured() -> Divergence:
        own, naive = (Comparison("x", 1.0, 2.0, kl, False, False, 0) for kl in (0.7, 1.0))
        return Divergence(SETTINGS.policy, (own,), (naive,))

    with pytest.raises(InputError, match=r"0\.7 nats"):
        start(0.5, True)
    good, bad = start(0.75, False), start(0.5, False)
    assert good.problem is None and good.status().policy == "legolink-4"
    status = bad.status()
    assert status.policy == "full" and status.divergence == {"legolink-4": 0.7} and "0.7 nats" in str(status.problem)
    good.close()
    bad.close()
