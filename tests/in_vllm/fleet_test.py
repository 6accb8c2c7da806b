"""Replicas with vLLM on a Ray of this machine, as `pic serve --ray --engine vllm` starts them: once for all tests here.

The same requests go to the torch engine's server in this process; answers, counts and refusals must be the same. The
last test kills an engine and a replica while requests run, and ends the server.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import vllm_rig as rig
from serve.live import DOCS, NAME, Live, serving
from vllm_server import environment

from pictool.linker.grid import parse_policy
from pictool.runtime.model import load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store

QUESTION = "\n\nReally?"
TEXTS = [f"{doc}It is page {i}, and it is read by nobody at all." for i, doc in enumerate(DOCS)]
ALICE, BOB = "a" * 20, "b" * 20
TENANTS = {ALICE: Tenant("alice", "0123456789abcdef" * 4), BOB: Tenant("bob", "fedcba9876543210" * 4)}
ASK = {"model": NAME, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
VLLM = ("--enforce-eager", "--max-model-len", "1024", "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20))
_START_S = 240  # of replicas, on a busy machine
ENGINE = "VLLM::EngineCor"  # as much of its name as the kernel keeps


@dataclass
class Fleet:
    """A server with two replicas."""

    live: Live
    server: subprocess.Popen[str]
    world: rig.World

    def named(self, word: str) -> list[psutil.Process]:
        """Its processes that have a word in their titles."""
        found = psutil.Process(self.server.pid).children(recursive=True)
        return [process for process in found if word in title_of(process)]

    def pair(self, word: str) -> list[psutil.Process]:
        """The two processes of that name, once both are there."""
        until = time.monotonic() + _START_S
        while len(found := self.named(word)) != 2:
            there = [(process.pid, process.ppid(), title_of(process)[:80]) for process in self.named("")]
            assert time.monotonic() < until, (there, self.log())
            time.sleep(0.2)
        first, second = found
        return [first, second]

    def log(self) -> str:
        """What the server and its replicas said."""
        return (Path(self.world.directory).parent / "server.log").read_text()

    def tiers_with(self, key: str) -> int:
        """How many replicas have an object."""
        return sum(Store(tier).path(key).exists() for tier in (self.world.store.root / "replicas").iterdir())


def title_of(process: psutil.Process) -> str:
    """Its name, of which the kernel keeps 15 characters, and its command line."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    world = rig.make_world(root, "llama")
    rig.set_chat_template(world)
    keys = root / "keys"
    keys.write_text("".join(f"{tenant.name} {key} {tenant.salt}\n" for key, tenant in TENANTS.items()))
    keys.chmod(0o600)
    command = [
        sys.executable, "-m", "pictool", "serve", "--ray", "local", "--replicas", "2", "--replica-cpus", "1",
        "--engine", "vllm", "-m", str(world.directory), "--device", "cpu", "--store", str(world.store.root),
        "--remote", str(root / "remote"), "--name", NAME, "--policy", "legolink-4", "--port", "0", "--keys", str(keys),
        "--check-limit", "9", "--", *VLLM,
    ]  # fmt: skip
    # The engine's worker in the engine's process: that starts sooner.
    variables = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    del variables["VLLM_CPU_KVCACHE_SPACE"]  # it would come before what the command line says
    with (root / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=root, text=True, stdout=log, stderr=log, env=variables)
    try:
        url, until = "", time.monotonic() + _START_S
        while not url:
            said = (root / "server.log").read_text()
            assert server.poll() is None and time.monotonic() < until, said
            url = said.partition("pic: serving tiny on ")[2].partition("/v1")[0]
            time.sleep(0.1)
        live = Live(url, None, None, world.store, ALICE)  # type: ignore[arg-type]
        live.client.timeout = httpx.Timeout(_START_S)
        with live.client:
            yield Fleet(live, server, world)
    finally:
        if server.poll() is None:
            for process in psutil.Process(server.pid).children(recursive=True):
                process.kill()
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def single(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The same model, keys and settings on the torch engine, in one process."""
    model = load_model(str(fleet.world.directory), "cpu", "float32")
    settings = BackendSettings(parse_policy("legolink-4"), refresh_s=3600, name=NAME)
    with serving(model, Store(tmp_path_factory.mktemp("single")), Keys(TENANTS), settings, key=ALICE) as live:
        yield live


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def chat(live: Live, messages: object, **more: Any) -> Any:
    return live.ok("POST", "/v1/chat/completions", json=ASK | {"messages": messages} | more)


def parts_of(names: list[str]) -> list[dict[str, Any]]:
    return [{"type": "cache", "cache_id": name} for name in names] + [{"type": "text", "text": QUESTION}]


def logprobs_of(response: Any) -> list[float]:
    """Of the first answer's tokens, and of the likeliest in their places."""
    tokens = response["choices"][0]["logprobs"]["content"]
    return [value for token in tokens for value in (token["logprob"], token["top_logprobs"][0]["logprob"])]


def streamed(live: Live, body: dict[str, Any]) -> tuple[str, list[str], Any]:
    """The text of a stream, the reasons of its ends, and its field `pic`."""
    with live.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    choices = [event["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [choice["finish_reason"] for choice in choices if choice["finish_reason"]], events[-1]["pic"]


@pytest.mark.parametrize("policy", ["legolink-4", "cacheblend-30", "legolink-0", "full"])
def test_answers_are_those_of_a_single_torch_server(fleet: Fleet, single: Live, policy: str) -> None:
    """Caches, a document in the request, text; counts, log-probabilities; whole and as a stream."""
    said = []
    for live in (fleet.live, single):
        parts = parts_of([live.cache(text) for text in TEXTS])
        parts.insert(1, {"type": "document", "text": "Said here. " * 8})
        more = {"pic": {"policy": policy}}
        said.append(chat(live, user(parts), **more))
        body = ASK | {"messages": user(parts)} | more
        text, reasons, report = streamed(live, body)
        whole = said[-1]["choices"][0]
        assert text == whole["message"]["content"] and reasons == [whole["finish_reason"]]
        counts = ("policy", "chunks", "exact_tokens", "source")  # vLLM's cache has the rest of a repeated prompt
        assert [report[name] for name in counts] == [said[-1]["pic"][name] for name in counts]
    got, want = said
    assert logprobs_of(got) == pytest.approx(logprobs_of(want), abs=rig.TOLERANCE)
    assert got["pic"] == want["pic"] and got["pic"]["chunks"] == (0 if policy == "full" else 4)
    for name in ("prompt_tokens", "completion_tokens"):
        assert got["usage"][name] == want["usage"][name]


def test_other_requests_are_answered_as_by_a_single_torch_server(fleet: Fleet, single: Live) -> None:
    """Two answers, a stop string, completions, a query, Gemini's form; refusals and what another tenant sees."""
    call = {"model": "spnl/any", "max_tokens": 6, "temperature": 0}
    query = {"g": call | {"input": {"cross": [{"plus": [{"user": text} for text in TEXTS]}, {"user": "Really?"}]}}}
    said, texts = [], []
    for live in (fleet.live, single):
        name = live.cache(TEXTS[0])
        two = chat(live, user(QUESTION), cache_ids=[name], n=2)
        completed = live.ok("POST", "/v1/completions", json={"model": NAME, "prompt": ["Really?", "Why?"],
                            "cache_ids": [name], "temperature": 0, "max_tokens": 4, "logprobs": 1})  # fmt: skip
        sampled = {"messages": user(QUESTION), "temperature": 0.9, "seed": 7, "n": 2}
        assert chat(live, **sampled)["choices"] == chat(live, **sampled)["choices"]
        stops = chat(live, user(QUESTION), stop=["e", "a", "s", " "], max_tokens=40)["choices"][0]
        wrong = [
            ASK | {"messages": user("x")} | change for change in ({"pic": {"policy": "no"}}, {"logit_bias": {"1": 101}})
        ]
        refused = [live.error(400, "POST", "/v1/chat/completions", json=body) for body in wrong]
        refused.append(live.error(400, "POST", "/v1/query/execute", content=b"{}"))
        asked = live.ok("POST", "/v1/query/execute", content=json.dumps(query))
        config = {"temperature": 0, "maxOutputTokens": 4, "candidateCount": 2}
        gemini = {"contents": [{"role": "user", "parts": [{"text": "Why?"}]}], "generationConfig": config}
        made = live.ok("POST", f"/v1beta/models/{NAME}:generateContent", json=gemini)
        with live.client_of(BOB) as bob:
            other = bob.post("/v1/chat/completions", json=ASK | {"messages": user("x"), "cache_ids": [name]})
            assert other.status_code == 404 and bob.get(f"/v1/caches/{name}").status_code == 404
        assert [choice["message"] for choice in two["choices"]] == [two["choices"][0]["message"]] * 2
        verified = chat(live, user(QUESTION), cache_ids=[name], verify=True)["pic"]["verify"]
        assert verified["kl"] > 0  # the tenant's object was linked, and its prompt computed in full
        said.append((two["pic"], verified["same_first_token"],
                     two["usage"]["completion_tokens"], stops["finish_reason"], completed["pic"], refused,
                     made["usageMetadata"]["promptTokenCount"]))  # fmt: skip
        texts.append((logprobs_of(two), [choice["logprobs"]["token_logprobs"][0] for choice in completed["choices"]]))
        assert asked["choices"][0]["text"] is not None
    assert said[0] == said[1]
    for ours, theirs in zip(*texts, strict=True):
        assert ours == pytest.approx(theirs, abs=rig.TOLERANCE)


def test_what_one_replica_compiled_the_other_links_from_the_remote(fleet: Fleet) -> None:
    """One asks for a document until it is on both: a replica that had many requests is passed over for the other."""
    before = set((fleet.world.store.root / "replicas").rglob("*.kvo"))
    name = fleet.live.cache("A text that nobody has compiled yet. " * 3)
    made = set((fleet.world.store.root / "replicas").rglob("*.kvo")) - before
    (key,) = {path.stem for path in made}
    assert fleet.tiers_with(key) == 1
    answers = list[Any]()
    while fleet.tiers_with(key) < 2:
        answers.append(chat(fleet.live, user(parts_of([name])), max_tokens=2))
        assert len(answers) < 400
    for answer in [*answers, chat(fleet.live, user(parts_of([name])), max_tokens=2)]:
        assert answer["pic"] == answers[0]["pic"] and answer["pic"]["chunks"] == 1
        assert logprobs_of(answer) == pytest.approx(logprobs_of(answers[0]), abs=rig.TOLERANCE)
    objects = [path.read_bytes() for path in (fleet.world.store.root / "replicas").rglob(f"{key}.kvo")]
    assert len(objects) == 2 and objects[0] == objects[1]


def test_the_api_knows_the_engines_limits(fleet: Fleet) -> None:
    (model,) = fleet.live.ok("GET", "/v1/models")["data"]
    assert model["max_model_len"] == 1024
    body = ASK | {"messages": user("word " * 1100)}
    assert fleet.live.error(400, "POST", "/v1/chat/completions", json=body)["code"] == "context_length_exceeded"


def test_what_dies_under_load_costs_no_wrong_answer_and_leaves_nothing(fleet: Fleet) -> None:
    """The engine of a replica is killed, then the other replica; then the server is ended."""
    plain = {"model": NAME, "temperature": 0, "max_tokens": 24}
    bodies = [plain | {"messages": user(parts_of([fleet.live.cache(text)]))} for text in TEXTS]

    def ask(number: int) -> httpx.Response:
        return fleet.live.client.post("/v1/chat/completions", json=bodies[number % len(bodies)])

    want = [ask(number).json()["choices"] for number in range(len(bodies))]
    first, second = fleet.pair(ENGINE)
    servers = [psutil.Process(engine.ppid()) for engine in (first, second)]
    replicas = [psutil.Process(server.ppid()) for server in servers]
    assert all("ServeReplica" in title_of(replica) for replica in replicas)
    assert {replica.nice() for replica in replicas} == {psutil.Process(fleet.server.pid).nice()}
    seen = set(psutil.Process(fleet.server.pid).children(recursive=True))
    for victim in (first, replicas[1]):
        statuses = Counter[int]()
        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask, number) for number in range(32)]
            for future in asking[:8]:
                future.result()
            victim.kill()
            for number, future in enumerate(asking):
                response = future.result()
                statuses[response.status_code] += 1
                if response.status_code == 200:
                    assert response.json()["choices"] == want[number % len(bodies)]
        assert statuses.keys() <= {200, 503} and statuses[200] >= 16, statuses
    _, left = psutil.wait_procs([first, second, *servers, *replicas], 30)
    assert not left  # an engine whose replica was killed ends, too, and so does a replica whose engine was
    fleet.pair(ENGINE)
    fleet.pair("ServeReplica")
    assert [ask(number).json()["choices"] for number in range(len(bodies))] == want
    seen |= set(psutil.Process(fleet.server.pid).children(recursive=True))
    fleet.server.send_signal(signal.SIGINT)
    assert fleet.server.wait(60) in (0, 130)
    _, left = psutil.wait_procs(seen, 20)
    assert not left, [title_of(process) for process in left]
    assert "Traceback" not in fleet.log(), fleet.log()
