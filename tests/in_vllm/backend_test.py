"""The router that fronts a vLLM of its own, as `pic serve --engine vllm` starts it: once for all tests of this module.

The same requests go to the torch engine's server in this process; answers, counts and refusals must be the same.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import vllm_rig as rig
from openai import NotFoundError, OpenAI
from serve.live import DOCS, NAME, Live, serving, text_of
from vllm_server import environment, wait_until_ready

from pictool.api import answer, compile
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import object_key
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.tenants import Keys, Tenant, read_keys
from pictool.store.store import Store

QUESTION = "\n\nReally?"
TEXTS = [f"{doc}It is page {i}, and it is read by nobody at all." for i, doc in enumerate(DOCS)]
KEYS = {"alice": "a" * 20, "bob": "b" * 20, "operator": "o" * 20}
SALTS = {"alice": "alice" * 8, "bob": "@/bob\\" * 40, "operator": "operator" * 8}  # bob's is none of vLLM's own
ASK = {"model": NAME, "temperature": 0, "max_tokens": 8}
VLLM = ("--enforce-eager", "--max-model-len", "1024", "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20))


@dataclass
class Served:
    """A server in processes of its own."""

    url: str
    world: rig.World
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, tenant: str | None = "alice") -> httpx.Client:
        headers = {} if tenant is None else {"Authorization": f"Bearer {KEYS[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def openai(self, tenant: str = "alice") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEYS[tenant], max_retries=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("backend")
    world = rig.make_world(root, "llama")
    rig.set_chat_template(world)
    keys = root / "keys"
    keys.write_text("".join(f"{name} {key} {SALTS[name]}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "pictool", "serve", "--engine", "vllm", "-m", str(world.directory), "--device", "cpu",
        "--store", str(world.store.root), "--name", NAME, "--policy", "legolink-4", "--port", str(port),
        "--keys", str(keys), "--min-tokens", "8", "--check-limit", "9", "--learn", "1G",
        "--active", "2", "--queue", "3", "--", *VLLM,
    ]  # fmt: skip
    log = root / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url, log)
        yield Served(url, world, process, log)
        assert "serving tiny on" in log.read_text()
    finally:
        process.terminate()
        try:
            process.wait(30)  # may be reached
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def torch_server(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The same model, keys and settings on the torch engine."""
    root = tmp_path_factory.mktemp("torch")
    model = load_model(str(served.world.directory), "cpu", "float32")
    keys = Keys({key: Tenant(name, SALTS[name]) for name, key in KEYS.items()})
    settings = BackendSettings(parse_policy("legolink-4"), min_tokens=8, refresh_s=3600, name=NAME)
    with serving(model, Store(root / "store"), keys, settings, key=KEYS["alice"]) as live:
        yield live


def caches(client: httpx.Client) -> list[str]:
    made = [client.post("/v1/caches", json={"model": NAME, "text": text}) for text in TEXTS]
    return [response.json()["id"] for response in made]


def known(client: httpx.Client) -> list[str]:
    """Caches whose texts are recognised from now on: the connector reads the store at most once a second.

    Each is asked for alone: together, asked for twice before the store is read, they would be learned as one document.
    """
    names, until = caches(client), time.monotonic() + 60
    for text in TEXTS:
        while chat(client, messages=user(f"{text}\n\nWhy?"), max_tokens=1)["pic"]["chunks"] < 1:
            assert time.monotonic() < until
            time.sleep(0.2)
    return names


def parts_of(names: list[str]) -> list[dict[str, Any]]:
    return [{"type": "cache", "cache_id": name} for name in names] + [{"type": "text", "text": QUESTION}]


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def logprobs_of(response: Any) -> list[float]:
    """Of the first answer's tokens. The two backends write bytes that are no text in different ways."""
    return [token["logprob"] for token in response["choices"][0]["logprobs"]["content"]]


def chat(client: httpx.Client, **more: Any) -> Any:
    response = client.post("/v1/chat/completions", json=ASK | more)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("policy", ["legolink-4", "naive", "cacheblend-30", "legolink-1", "full"])
def test_answers_are_those_of_pic_link(served: Served, tmp_path: Path, policy: str) -> None:
    model = load_model(str(served.world.directory), "cpu", "float32")
    files = [tmp_path / f"{i}.txt" for i in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        file.write_text(text, encoding="utf-8")
    spec = Spec("Really?", files, parse_policy(policy), max_new_tokens=8)
    want = answer(model, Store(tmp_path / "other"), spec)
    with served.client() as client:
        options = {"pic": {"policy": policy}, "logprobs": True}
        got = chat(client, messages=user(parts_of(caches(client))), **options)
        assert logprobs_of(got) == pytest.approx(want.generated.logprobs, abs=rig.TOLERANCE)
        assert got["usage"]["prompt_tokens"] == want.link.layout.num_tokens
        if policy == "full":
            exact = chat(client, messages=user("".join(TEXTS) + QUESTION), pic=False)
            assert exact["pic"]["policy"] == "full" and exact["pic"]["linked_tokens"] == 0
        else:
            assert (got["pic"]["chunks"], got["pic"]["source"]) == (len(TEXTS), "cache")
            assert got["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


BODIES: dict[str, dict[str, Any]] = {
    "caches beside": {"messages": user(QUESTION), "cache_ids": "ALL"},
    "caches with text around": {"messages": user([{"type": "text", "text": "Read this: "}, "CACHE 1", "CACHE 0",
                                                  {"type": "text", "text": f"and {TEXTS[2]} so{QUESTION}"}])},
    "several messages": {"messages": [{"role": "system", "content": "Be brief."}, *user(["CACHE 0"]),
                                      {"role": "assistant", "content": "Yes."}, *user(["CACHE 0", "CACHE 2"])]},
    "documents": {"messages": user(QUESTION), "documents": [{"title": "x", "text": text} for text in TEXTS]},
    "document parts": {"messages": user([{"type": "document", "text": TEXTS[0]},
                                         {"type": "document", "source": {"type": "text", "data": TEXTS[1]}},
                                         {"type": "text", "text": QUESTION}])},
    "a marker": {"messages": user([{"type": "text", "text": TEXTS[1] + " It was marked.", "cache_control": {}},
                                   {"type": "text", "text": QUESTION}])},
    "pasted": {"messages": user(f"Context:\n<doc>{TEXTS[0]}</doc>\n\n- {TEXTS[2]}{QUESTION}")},
    "JSON": {"messages": user(json.dumps({"results": [f"{text}\n\"Quoted.\"" for text in TEXTS]}))},
    "a quotation": {"messages": user("".join(f"> {line}\n" for line in TEXTS[0].splitlines()) + "> \n" + QUESTION)},
    "nothing": {"messages": user("Why is nothing here?")},
    "no linking": {"messages": user([*(f"CACHE {i}" for i in range(3)), {"type": "text", "text": QUESTION}]),
                   "pic": False},
}  # fmt: skip


def filled(body: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A body with a server's own cache ids."""
    parts = {f"CACHE {i}": {"type": "cache", "cache_id": name} for i, name in enumerate(names)}
    messages = [
        message | {"content": [parts.get(part, part) if isinstance(part, str) else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in body["messages"]
    ]
    ids = {"cache_ids": names} if body.get("cache_ids") == "ALL" else {}
    return {**body, "messages": messages, **ids}


@pytest.mark.parametrize("name", list(BODIES))
def test_both_backends_say_the_same(served: Served, torch_server: Live, name: str) -> None:
    with served.client() as client:
        got = chat(client, logprobs=True, **filled(BODIES[name], known(client)))
    names = caches(torch_server.client)
    torch_server.backend.index.refresh()
    want = chat(torch_server.client, logprobs=True, **filled(BODIES[name], names))
    assert logprobs_of(got) == pytest.approx(logprobs_of(want), abs=rig.TOLERANCE)
    assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    assert got["pic"] == want["pic"]


def test_documents_are_found_by_a_query(served: Served, torch_server: Live) -> None:
    """Among the tenant's own: both backends find and link the same ones, and another tenant finds none."""
    body = {"messages": user(QUESTION), "documents": {"query": TEXTS[1], "k": 1}, "logprobs": True}
    body["pic"] = {"explain": True}
    with served.client() as client, served.client("bob") as bob:
        known(client)
        until = time.monotonic() + 60
        while not (found := client.post("/v1/chat/completions", json=ASK | body)).is_success:  # until they are read
            assert time.monotonic() < until, found.text
            time.sleep(0.2)
        got = found.json()
        refused = bob.post("/v1/chat/completions", json=ASK | body)
    caches(torch_server.client)
    torch_server.backend.index.refresh()
    want = chat(torch_server.client, **body)
    (document,), (part,) = got["pic"]["retrieved"], [part for part in got["pic"]["parts"] if part["state"] == "linked"]
    assert TEXTS[1].startswith(part["text"]) and part["key"] == document["key"]
    assert refused.status_code == 400 and "no stored document" in refused.text
    assert (got["pic"]["source"], got["pic"]["chunks"]) == ("retrieved", 1)
    (other,) = want["pic"]["retrieved"]  # its score is that among fewer documents
    assert other | {"score": 0} == document | {"score": 0} and document["score"] > 0
    assert logprobs_of(got) == pytest.approx(logprobs_of(want), abs=rig.TOLERANCE)


def test_completions_put_objects_before_their_prompts(served: Served, torch_server: Live) -> None:
    body = ASK | {"prompt": ["Really?", "Why?"], "pic": {"policy": "naive"}, "logprobs": 0}
    said = []
    with served.client() as client:
        for backend in (client, torch_server.client):
            response = backend.post("/v1/completions", json=body | {"cache_ids": caches(backend)})
            said.append(response.json())
    got, want = said
    for a, b in zip(got["choices"], want["choices"], strict=True):
        assert a["logprobs"]["token_logprobs"] == pytest.approx(b["logprobs"]["token_logprobs"], abs=rig.TOLERANCE)
    assert got["pic"] == want["pic"] and len(got["pic"]) == 2


def test_the_openai_client_streams_lists_and_uploads(served: Served) -> None:
    with served.openai() as client:
        assert [model.id for model in client.models.list()] == [NAME]
        file = client.files.create(file=("a.txt", TEXTS[0].encode()), purpose="user_data")
        assert client.files.content(file.id).text == TEXTS[0]
        content: Any = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": QUESTION}]
        options: Any = ASK | {"temperature": 0.5, "seed": 3, "messages": user(content), "n": 2}
        whole = client.chat.completions.create(**options)
        *parts, last = client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )  # fmt: skip
        for index in range(2):
            texts = [part.choices[0].delta.content or "" for part in parts if part.choices[0].index == index]
            assert "".join(texts) == whole.choices[index].message.content
        reports = [part.model_extra["pic"] for part in parts if "pic" in (part.model_extra or {})]
        assert reports == [(whole.model_extra or {})["pic"]] and reports[0]["source"] == "marker"
        assert last.usage is not None and whole.usage is not None
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        client.files.delete(file.id)
        with pytest.raises(NotFoundError):
            client.files.retrieve(file.id)


def test_another_key_finds_nothing(served: Served) -> None:
    with served.client() as alice, served.client("bob") as bob:
        names = known(alice)
        file = alice.post("/v1/files", files={"file": ("a.txt", TEXTS[0].encode())}).json()["id"]
        absent = "cache-" + "0" * 32
        for path in (f"/v1/caches/{names[0]}", f"/v1/files/{file}", f"/v1beta/cachedContents/{names[0]}"):
            assert bob.get(path).status_code == 404 and alice.get(path).status_code == 200
        said = []
        for name in (names[0], absent):
            response = bob.post("/v1/chat/completions", json=ASK | {"messages": user(parts_of([name]))})
            assert response.status_code == 404
            said.append(response.text.replace(name, "NAME"))
        assert said[0] == said[1] and bob.get("/v1/caches").json()["data"] == []
        pasted = user(TEXTS[0] + TEXTS[1] + " Who is it that asks?")
        assert chat(alice, messages=pasted)["pic"]["chunks"] == 2
        for _ in range(2):  # nor by what vLLM's own cache has
            got = chat(bob, messages=pasted, max_tokens=1)
            assert got["pic"]["chunks"] == 0
            assert got["usage"]["prompt_tokens_details"]["cached_tokens"] in (0, got["pic"]["exact_tokens"] // 32 * 32)


def test_keys_guard_every_route_and_say_the_salt(served: Served) -> None:
    with served.client(None) as nobody, served.client() as alice, served.client("operator") as operator:
        for path in ("/v1/models", "/metrics", "/v1/caches", "/v1beta/models"):
            assert nobody.get(path).status_code == 401
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/query/execute"):
            assert nobody.post(path, json=ASK | {"messages": user("Why?")}).status_code == 401
        assert nobody.get("/health").status_code == nobody.get("/version").status_code == 200
        assert alice.post("/v1/responses", json={"model": NAME, "input": "Why?"}).status_code == 200
        assert alice.get("/metrics").status_code == 403 and operator.get("/metrics").status_code == 200


def test_the_check_is_in_health_and_metrics_and_leaves_nothing(served: Served) -> None:
    with served.client("operator") as client:
        health = client.get("/health").json()
        lines = client.get("/metrics").text.splitlines()
    figure = health["divergence_nats"]["legolink-4"]
    assert health["status"] == "ok" and health["problem"] is None and 0 < figure < 9
    (line,) = [line for line in lines if line.startswith("pic_divergence_nats")]
    assert float(line.split()[-1]) == pytest.approx(figure)
    assert "pic_fell_back_to_exact 0.0" in lines


def test_a_verified_answer_says_how_far_it_is_from_full(served: Served) -> None:
    with served.client() as client:
        content = parts_of(caches(client))
        for stream in (False, True):
            body = ASK | {"messages": user(content), "verify": True, "pic": {"policy": "naive"}, "stream": stream}
            response = client.post("/v1/chat/completions", json=body)
            events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
            report = next(event["pic"] for event in events if "pic" in event) if stream else response.json()["pic"]
            full = chat(client, messages=user(content), pic=False)
            assert report["verify"]["answer"] == text_of(full).strip() and report["verify"]["kl"] > 0
        same = chat(client, messages=user("Why?"), verify=True)["pic"]["verify"]
        assert same["same_answer"] and same["same_first_token"] and same["kl"] == pytest.approx(0, abs=1e-6)


def test_gemini_and_span_queries(served: Served, torch_server: Live) -> None:
    body = {"contents": [{"parts": [{"text": QUESTION}]}], "generationConfig": {"temperature": 0, "maxOutputTokens": 6}}
    documents = {"plus": [{"user": text} for text in TEXTS]}
    options = {"model": "spnl/any", "max_tokens": 6, "temperature": 0}
    query = {"g": options | {"input": {"cross": [documents, {"user": "Really?"}]}}}
    said: list[Any] = []
    with served.client() as client:
        for backend in (client, torch_server.client):
            contents = {"model": NAME, "contents": [{"parts": [{"text": text}]} for text in TEXTS], "ttl": "60s"}
            name = backend.post("/v1beta/cachedContents", json=contents).json()["name"]
            path = f"/v1beta/models/{NAME}:generateContent"
            whole = backend.post(path, json=body | {"cachedContent": name}).json()
            streamed = backend.post(
                path.replace(":g", ":streamG") + "?alt=sse", json=body | {"cachedContent": name}
            ).text
            texts = [json.loads(line[6:])["candidates"][0]["content"]["parts"][0]["text"]
                     for line in streamed.split("\n\n") if line]  # fmt: skip
            text = whole["candidates"][0]["content"]["parts"][0]["text"]
            assert "".join(texts) == text
            queried = backend.post("/v1/query/execute", content=json.dumps(query))
            assert queried.status_code == 200, queried.text
            answers = [text, *(choice["text"] for choice in queried.json()["choices"])]
            count = whole["usageMetadata"]["promptTokenCount"]
            said.append(([part.rstrip("\ufffd") for part in answers], whole["pic"], count))
    assert said[0] == said[1] and said[0][1]["chunks"] == len(TEXTS)


def test_queries_run_beside_each_other_and_vanish_with_their_clients(served: Served) -> None:
    """Beside one of a hundred long calls, of which two run (`--active 2`), others are answered as they are alone."""
    call = {"model": "spnl/any", "max_tokens": 6, "temperature": 0}
    documents = {"cross": [{"plus": [{"user": text} for text in TEXTS]}, {"user": "Really?"}]}
    queries: list[dict[str, Any]] = [
        {"map": {"metadata": call, "inputs": ["Really?", "Why?", "Who asks?"]}}, {"g": call | {"input": documents}},
        {"par": [{"g": call | {"input": documents}}, {"g": call | {"input": {"user": "Why?"}}}]},
    ]  # fmt: skip
    long = {"repeat": {"n": 100, "g": call | {"max_tokens": 400, "temperature": 1.2, "input": {"user": "On?"}}}}

    def ask(client: httpx.Client, query: dict[str, Any]) -> list[str]:
        response = client.post("/v1/query/execute", content=json.dumps(query))
        assert response.status_code == 200, response.text
        return [choice["text"] for choice in response.json()["choices"]]

    def health(client: httpx.Client) -> tuple[int, int]:
        said = client.get("/health").json()
        return said["active"], said["waiting"]

    with ExitStack() as opened:
        alice, bob = (opened.enter_context(served.client(name)) for name in ("alice", "bob"))
        threads = opened.enter_context(ThreadPoolExecutor(8))
        want = [ask(alice, query) for query in queries]
        leaving = opened.enter_context(closing(HTTPConnection(served.url.removeprefix("http://"))))
        leaving.request("POST", "/v1/query/execute", json.dumps(long), {"Authorization": f"Bearer {KEYS['alice']}"})
        wait_for(lambda: health(alice) == (2, 1))
        got = [threads.submit(ask, client, query) for query in queries for client in (alice, bob)]
        assert [each.result() for each in got] == [texts for texts in want for _ in range(2)]
        assert chat(bob, messages=user("Why?"), max_tokens=1)["choices"]
        wait_for(lambda: health(alice) == (2, 1))
        leaving.close()
        wait_for(lambda: health(alice) == (0, 0))


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def learned_bytes(served: Served) -> float:
    with served.client("operator") as client:
        lines = client.get("/metrics").text.splitlines()
    assert "pic_learning_failures_total 0.0" in lines
    (line,) = [line for line in lines if line.startswith("pic_learned_bytes_total ")]
    return float(line.split()[-1])


def test_what_is_repeated_becomes_the_object_that_pic_compile_makes(served: Served, tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {i} of what nobody has compiled: {DOCS[i % len(DOCS)].strip()}" for i in range(5))
    before, until = set(served.world.store.root.rglob("*.kvo")), time.monotonic() + 60
    learned_before = learned_bytes(served)

    def ask(client: httpx.Client, question: str, **more: Any) -> Any:
        return chat(client, messages=user(f"Context:\n{text}\n\n{question}"), **more)

    with served.client() as alice, served.client("bob") as bob:
        for client in (bob, alice, alice):
            assert ask(client, "What?", pic=False)["pic"]["chunks"] == 0  # what says that it is not linked
        assert set(served.world.store.root.rglob("*.kvo")) == before
        assert ask(alice, "What?")["pic"]["chunks"] == 0
        while (learned := ask(alice, "Who?", stream=False)["pic"])["chunks"] == 0:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert learned["source"] == "moved"
        exact = ask(alice, "Who?", pic={"policy": "full"}, logprobs=True)
        assert logprobs_of(ask(alice, "Who?", pic={"policy": "legolink-999"}, logprobs=True)) == pytest.approx(
            logprobs_of(exact), abs=rig.TOLERANCE
        )
    made = set(served.world.store.root.rglob("*.kvo")) - before
    assert made and sum(path.stat().st_size for path in made) == learned_bytes(served) - learned_before
    model = load_model(str(served.world.directory), "cpu", "float32").with_salt("alice" * 8)
    for path in made:
        with served.world.store.peek(path.stem) as own:
            chunk = make_chunk(model, own.text(), "")
            (done,) = compile(model, Store(tmp_path / "other"), [chunk])
            assert done.key == path.stem
            with Store(tmp_path / "other").peek(done.key) as theirs:
                for layer in range(model.geometry.layers):
                    for a, b in zip(own.layer(layer), theirs.layer(layer), strict=True):
                        assert np.frombuffer(a, np.float32) == pytest.approx(np.frombuffer(b, np.float32), abs=1e-4)


def link_events(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post("/v1/link", json=body)
    assert response.status_code == 200, response.text
    *lines, last = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("policy", [{"algo": "legolink", "k": 4}, {"algo": "cacheblend"}, {"algo": "full"}])
def test_what_pic_link_sends_is_answered_as_by_the_torch_backend(
    served: Served, torch_server: Live, policy: dict[str, Any]
) -> None:
    texts = [f"{text} It is linked for the {policy['algo']}." for text in TEXTS]
    documents = [{"text": text, "source": f"{i}.txt"} for i, text in enumerate(texts)]
    body = {"query": "Really?", "documents": documents, "policy": policy, "max_new_tokens": 8, "compare": True}
    said: list[dict[str, Any]] = []
    times = 2  # the second time all is compiled, and vLLM's own cache changes no count
    with served.client() as client:
        for backend in (client, torch_server.client):
            for _ in range(times):
                events = link_events(backend, body)
                *_, last = events
                made = [event["compiled"] for event in events if "compiled" in event]
                parts = [part for part in made if part["source"] != "head"]  # another test may have had it made
                compiled = sorted(parts, key=lambda part: part["source"])  # the backends compile in different orders
                text = "".join(event.get("text", "") for event in events)
                report = last["report"]
                compare = {name: report["compare"][name] for name in ("answer", "same_answer", "common_prefix")}
                tokens = {name: round(count, 6) for name, count in report["tokens"].items()}
                origin = {name: last["origin"][name] for name in ("objects", "fingerprint", "dtype")}
                said.append(
                    {"compiled": compiled, "text": text, "answer": report["answer"], "params": report["params"]}
                    | {"tokens": tokens, "compare": compare, "origin": origin}
                )
                assert report["engine"] == ("vllm" if backend is client else "torch") and report["model"] == NAME
                assert report["compare"]["kl"] == pytest.approx(0, abs=1e-5) or policy["algo"] != "full"
    for ours, theirs in zip(said[:times], said[times:], strict=True):
        for name, value in ours.items():
            assert value == theirs[name], name
    assert (len(said[0]["compiled"]) >= len(TEXTS) or policy["algo"] == "full") and not said[1]["compiled"]


def test_a_damaged_object_that_is_named_is_an_error(served: Served) -> None:
    """A chat is answered exactly; who names the object has the error, and no answer."""
    model = load_model(str(served.world.directory), "cpu", "float32").with_salt(SALTS["alice"])
    chunk = make_chunk(model, f"{TEXTS[0]} It is damaged.", "")
    with served.client() as client:
        client.post("/v1/caches", json={"model": NAME, "text": chunk.text})
        path = served.world.store.path(object_key(model, chunk, rig.OPTIONS))
        data = bytearray(path.read_bytes())
        data[-200] ^= 1
        path.write_bytes(data)
        body = {"query": "Really?", "documents": [{"key": path.stem}], "policy": {"algo": "naive"}}
        said = client.post("/v1/link", json=body).text
        assert "error" in said and "report" not in said
        path.unlink()


def test_what_vllm_cannot_link_for_is_refused_by_name(served: Served) -> None:
    body = {"query": "Really?", "documents": [{"text": TEXTS[0]}], "policy": {"algo": "naive"}}
    refused: list[tuple[int, dict[str, Any], str]] = [
        (400, {"codec": "int8"}, "--codec int8: vLLM"),
        (400, {"policy": {"algo": "prefix"}}, "--algo prefix: "),
        (400, {"documents": [{"text": "word " * 1200}]}, "2048 positions"),
        (400, {"query": "word " * 3000}, "positions"),
        (404, {"documents": [{"key": "ab" * 32}]}, "not found"),
    ]
    with served.client() as client:
        for status, change, word in refused:
            response = client.post("/v1/link", json=body | change)
            assert response.status_code == status and word in response.json()["error"]["message"]


@contextmanager
def both_places(served: Served, client: httpx.Client) -> Iterator[list[httpx.Response]]:
    """Two answers of some seconds that stream at once; asked for anew if one has ended before the other began."""
    body = ASK | {"messages": user("Why is it so long?"), "max_tokens": 900, "stream": True}
    body["logit_bias"] = {str(served.world.model.encode("long")[-1]): 100}  # each token is text, and none ends it
    while True:
        with ExitStack() as opened:
            streams = [opened.enter_context(client.stream("POST", "/v1/chat/completions", json=body)) for _ in range(2)]
            assert [stream.status_code for stream in streams] == [200, 200]
            if client.get("/health").json()["active"] == 2:
                yield streams
                return


SHORT = ASK | {"messages": user("Why?"), "max_tokens": 1}


def test_who_goes_away_waits_no_more(served: Served) -> None:
    with served.client() as alice:
        is_gone = False
        while not is_gone:  # it is answered if the streams have ended, on a machine that stood still
            with both_places(served, alice):
                try:
                    alice.post("/v1/chat/completions", json=SHORT, timeout=0.3)
                except httpx.ReadTimeout:
                    is_gone = True
        wait_for(lambda: all(alice.get("/health").json()[name] == 0 for name in ("waiting", "active")))


def test_the_queue_is_bounded(served: Served) -> None:
    """Two stream, three wait, the next is refused (`--active 2 --queue 3`); in the end nobody waits or runs."""
    with ExitStack() as opened:
        alice = opened.enter_context(served.client())
        bob = opened.enter_context(served.client("bob"))
        threads = opened.enter_context(ThreadPoolExecutor(8))
        with both_places(served, alice) as streams:
            waiting = [threads.submit(alice.post, "/v1/chat/completions", json=SHORT) for _ in range(3)]
            wait_for(lambda: alice.get("/health").json()["waiting"] == 3)
            refused = alice.post("/v1/chat/completions", json=SHORT)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            taking = threads.submit(bob.post, "/v1/chat/completions", json=SHORT)  # takes the place of alice's last
            (lost,) = wait(waiting, 60, FIRST_COMPLETED).done
            assert lost.result().status_code == 429
            for stream in streams:  # go away in the middle
                stream.close()
        assert taking.result(60).status_code == 200
        assert sorted(answer.result(60).status_code for answer in waiting) == [200, 200, 429]
        wait_for(lambda: all(alice.get("/health").json()[name] == 0 for name in ("waiting", "active")))


WRONG: list[tuple[int, dict[str, Any]]] = [
    (404, {"cache_ids": ["cache-0"]}),
    (404, {"model": "other"}),
    (400, {"pic": {"policy": "magic"}}),
    (400, {"pic": {"policy": "prefix"}}),
    (422, {"pic": {"polixy": 1}}),
    (422, {"cache_ids": 5}),
    (400, {"messages": user([{"type": "document"}])}),
    (422, {"messages": "text"}),
    (422, {"messages": []}),
    (422, {"messages": None}),
    (400, {"documents": [{"text": "word " * 2000}]}),
    (422, {"max_tokens": -5}),
    (422, {"max_tokens": 0}),
    (422, {"n": 3000, "temperature": 1}),
    (422, {"n": 0}),
    (422, {"stop": ["a"] * 17}),
    (422, {"stop": "a" * 5000}),
    (422, {"temperature": 3}),
    (422, {"top_p": 0}),
    (422, {"seed": 1 << 64}),
    (400, {"pic": {"policy": "speccache-15"}}),
    (400, {"pic": {"policy": "fixup-10"}}),
    (400, {"stop": "\ud800"}),
]


def is_of_both(change: dict[str, Any]) -> bool:
    """Whether the torch backend refuses it too: it has `prefix`."""
    return change.get("pic") != {"policy": "prefix"}


@pytest.mark.parametrize(("status", "change"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_why(served: Served, torch_server: Live, status: int, change: dict[str, Any]) -> None:
    with served.client() as client:
        for backend in (client, torch_server.client) if is_of_both(change) else (client,):
            ids = {"cache_ids": caches(backend)} if change.get("cache_ids") == "ALL" else {}
            for more in ({}, {"stream": True}):
                body = json.dumps(ASK | {"messages": user("Why?")} | more | change | ids)
                headers = {"Content-Type": "application/json"}
                response = backend.post("/v1/chat/completions", content=body, headers=headers)
                assert response.status_code == status or change.get("stop") == "\ud800", response.text
                error = response.json()["error"]
                assert response.status_code in (400, 404, 422) and error["message"]
                assert response.status_code != 422 or error["param"] in change


def test_bounds_of_completions_are_those_of_both_backends(served: Served, torch_server: Live) -> None:
    changes: list[dict[str, Any]] = [
        {"n": 17}, {"max_tokens": 0}, {"prompt": ["Why?"] * 65}, {"stop": ["a" * 3000] * 2}
    ]  # fmt: skip
    with served.client() as client:
        for change in changes:
            said = [backend.post("/v1/completions", json=ASK | {"prompt": "Why?"} | change).status_code
                    for backend in (client, torch_server.client)]  # fmt: skip
            assert said[0] == said[1] and said[0] in (400, 422), change


def test_any_seed_gives_its_own_answer(served: Served) -> None:
    with served.client() as client:
        for seed in ((1 << 64) - 1, -1):
            body = {"messages": user("Why?"), "temperature": 1, "seed": seed}
            assert text_of(chat(client, **body)) == text_of(chat(client, **body))


def test_a_sampled_answer_is_verified(served: Served) -> None:
    """At a temperature at which tokens beyond the likeliest are drawn."""
    with served.client() as client:
        content = parts_of(caches(client))
        for seed in range(4):
            body = {"messages": user(content), "temperature": 2, "seed": seed, "verify": True}
            assert chat(client, **body)["pic"]["verify"]["kl"] >= 0


def test_the_file_of_keys_is_the_servers(served: Served) -> None:
    assert read_keys(served.world.directory.parent / "keys").find(KEYS["bob"]) == Tenant("bob", SALTS["bob"])


def test_a_server_whose_engine_was_killed_ends_with_an_error(served: Served) -> None:
    """Last of all: no other test has a server after this one."""
    engine = next(
        child for child in psutil.Process(served.process.pid).children(recursive=True) if "EngineCore" in child.name()
    )
    engine.kill()
    assert served.process.wait(60) == 1
    assert any(line.startswith("pic: error: ") for line in served.log.read_text().splitlines())
