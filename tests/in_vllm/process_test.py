"""Linked requests in other processes: the multiprocess engine, tensor parallelism, and the OpenAI server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import vllm_rig as rig
from vllm_matrix import Answered, Count
from vllm_server import environment, server

from pictool.compiler.compile import object_key

CELLS = {
    "drafts-by-ngrams": "speculative decoding by n-grams",
    "tensor-parallel-2": "--tensor-parallel-size 2",
    "tensor-parallel-2-one-kv-head": "--tensor-parallel-size 2, a KV head on several ranks",
}
SPECS = ("naive", "legolink-4", "legolink-16", "legolink-1", "cacheblend-15", "legolink-1000")
HERE = Path(__file__).parent
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "drafts-by-ngrams": {"speculative_config": DRAFTS},
    "tensor-parallel-2": {"tensor_parallel_size": 2, "extra": {"step_ms": 0.01, "step_rows": 5, "step_bytes": 9000}},
    "tensor-parallel-2-one-kv-head": {"tensor_parallel_size": 2},
}


def ask_in_processes(
    world: rig.World, cases: Sequence[rig.Case], options: dict[str, Any], breaks: Path | None
) -> tuple[list[rig.Answer], float]:
    """The answers, and how many of their tokens were drafts."""
    job = {
        "model": str(world.directory), "store": str(world.store.root), "options": options, "num_tokens": 12,
        "cases": [(case.tokens, case.params) for case in cases], "break": None if breaks is None else str(breaks),
    }  # fmt: skip
    path = world.directory.parent / "cases.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(HERE / "served.py"), str(path)], env=environment(), capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    answers, accepted = torch.load(path.with_suffix(".pt"))
    return [rig.Answer(*fields) for fields in answers], accepted


@pytest.mark.parametrize("name", list(OPTIONS))
def test_in_processes(tmp_path: Path, name: str, answered: Answered) -> None:
    """The last request names an object that was damaged meanwhile."""
    world = rig.make_world(tmp_path, "llama-one-head" if name.endswith("one-kv-head") else "llama")
    small = str(tiny.save_model(tmp_path / "small", rig.CONFIGS["llama"](), seed=7))
    cases = [world.case(spec) for spec in SPECS]
    cases += [world.case(rig.make_policy("speccache", {"spec_model": small}), seed=2), world.exact()]
    cases += rig.mixed(world, answered.per_cell - len(cases))
    assert cases[0].params is not None
    breaks = world.store.path(cases[0].params["pic"]["chunks"][2]["key"])
    (*answers, broken), accepted = ask_in_processes(world, cases, OPTIONS[name], breaks)
    answered.check(CELLS[name], cases, answers)
    assert (accepted > 0) == ("speculative_config" in OPTIONS[name])
    assert broken.report is not None and broken.report["state"] == "exact"
    assert rig.difference(rig.Case(cases[0].tokens, None, world.exact().linked), broken) <= rig.TOLERANCE


def post(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def completion(case: rig.Case, **more: Any) -> dict[str, Any]:
    transfer = {} if case.params is None else {"kv_transfer_params": case.params}
    body = {"model": "tiny", "prompt": case.tokens, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return {**body, "logprobs": 5, "return_tokens_as_token_ids": True, **transfer, **more}


def top_logprobs(logprobs: dict[str, Any]) -> list[dict[int, float]]:
    """Tokens and their log-probabilities at every token of an answer."""
    rows = logprobs["top_logprobs"]
    return [{int(name.removeprefix("token_id:")): value for name, value in row.items()} for row in rows]


def require_same(case: rig.Case, rows: Sequence[dict[int, float]]) -> float:
    """The largest difference from the reference, which must be small."""
    best = [max(row, key=lambda token: row[token]) for row in rows]
    wanted = case.logprobs(best)
    assert all(len(row) >= 5 for row in rows)
    differences = [
        abs(value - float(reference[token]))
        for row, reference in zip(rows, wanted, strict=True)
        for token, value in row.items()
    ]
    assert max(differences) <= rig.TOLERANCE
    return max(differences)


def require_links(cases: Sequence[rig.Case], said: Sequence[dict[str, Any]]) -> Count:
    """Completions that equal their references; what names objects was linked."""
    count = Count()
    for case, response in zip(cases, said, strict=True):
        report = (response["kv_transfer_params"] or {}).get("pic")
        assert (report and report["state"]) == (None if case.params is None else "linked"), report
        worst = require_same(case, top_logprobs(response["choices"][0]["logprobs"]))
        count.add(case.params is not None, worst)
    return count


def metrics_of(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        return str(response.read().decode()).splitlines()


def test_two_engines_behind_two_servers(tmp_path: Path, answered: Answered) -> None:
    """They share the store; each engine has blocks and salts of its own, and vLLM gives requests to either."""
    world = rig.make_world(tmp_path, "llama")
    cases = rig.mixed(world, max(answered.per_cell, 10))
    options = ("--data-parallel-size", "2", "--api-server-count", "2")
    with server(world, {}, *options) as url, ThreadPoolExecutor(4) as threads:
        bodies = map(completion, cases)
        said = list(threads.map(lambda body: json.loads(post(f"{url}/v1/completions", body)), bodies))
        lines = metrics_of(url)
    count = require_links(cases, said)
    answered.record("--data-parallel-size 2", count)
    answered.record("--api-server-count 2", count)
    linked = [line for line in lines if line.startswith("vllm:pic_linked_requests_total{")]
    engines = {re.findall(r'engine="(\d+)"', line)[0] for line in linked if float(line.split()[-1]) > 0}
    assert engines == {"0", "1"}


def test_the_openai_server(tmp_path: Path, answered: Answered) -> None:
    """Completions with and without streaming, a chat whose text holds stored documents, metrics."""
    world = rig.make_world(tmp_path, "llama")
    rig.set_chat_template(world)
    with server(world, {"recognise": True, "policy": "legolink-4", "min_tokens": 8, "refresh_s": 1}) as url:
        for spec in SPECS:
            case = world.case(spec)
            said = json.loads(post(f"{url}/v1/completions", completion(case)))
            require_same(case, top_logprobs(said["choices"][0]["logprobs"]))
            assert said["kv_transfer_params"]["pic"]["state"] == "linked"
        streams(world, url)
        chats(world, url)
        num_pasted = pastes(world, url)
        num_echoed = echoes(world, url, answered)
        fails(world, url)
        lines = metrics_of(url)
    counters = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("vllm:pic_")}
    assert counters["vllm:pic_failed_requests_total"] == 2  # of `echoes` and `fails`
    assert counters["vllm:pic_linked_requests_total"] == len(SPECS) + 2 + num_pasted + num_echoed
    assert counters["vllm:pic_reused_tokens_total"] > 0


def streams(world: rig.World, url: str) -> None:
    case = world.case("cacheblend-15", seed=1)
    lines = post(f"{url}/v1/completions", completion(case, stream=True)).splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(parts) >= 3
    reports = [said["pic"]["state"] for part in parts if (said := part.get("kv_transfer_params"))]
    assert reports in ([], ["linked"])  # at the end, from 0.33 on
    require_same(case, [row for part in parts for row in top_logprobs(part["choices"][0]["logprobs"])])


def chats(world: rig.World, url: str) -> None:
    """The server was started to recognise chunks: an ordinary request is linked without a field `pic`."""
    chunks = rig.text_chunks(world.model)
    text = "".join(chunk.text for chunk in chunks)
    case = world.case("legolink-4", chunks=chunks, head="<s>user:", tail=" Why?assistant:")
    wait_for_index()
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": f"{text} Why?"}], "max_tokens": 3, "temperature": 0,
        "logprobs": True, "top_logprobs": 5, "return_tokens_as_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    for opted_out, reference in (
        (False, case),
        (True, world.case("full", chunks=chunks, head="<s>user:", tail=" Why?assistant:")),
    ):
        more = {"kv_transfer_params": {"pic": False}} if opted_out else {}
        said = json.loads(post(f"{url}/v1/chat/completions", {**body, **more}))
        content = said["choices"][0]["logprobs"]["content"]
        rows = [
            {int(entry["token"].removeprefix("token_id:")): entry["logprob"] for entry in token["top_logprobs"]}
            for token in content
        ]
        require_same(reference, rows)
        state = (said["kv_transfer_params"] or {}).get("pic", {}).get("state")
        assert state == (None if opted_out else "linked")


def pastes(world: rig.World, url: str) -> int:
    """Chats in which documents are what applications make of them; returns how many. All documents are linked."""
    chunks = rig.text_chunks(world.model)
    texts = [chunk.text for chunk in chunks]
    keys = [object_key(world.model, chunk, rig.OPTIONS) for chunk in chunks]
    quoted = "\n".join(f'{i}. "{text}"' for i, text in enumerate(texts))
    parts = [{"type": "text", "text": text} for text in (*texts, "Why?")]
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"Context:\n{quoted}\n\nWhy?"}]},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": "Why?"}], "documents": [{"text": text} for text in texts]},
        {
            "messages": [{"role": "user", "content": f"Read:{quoted}Why?"}],
            "kv_transfer_params": {"pic": {"keys": keys, "policy": "naive"}},
        },
    ]
    for body in bodies:
        said = json.loads(post(f"{url}/v1/chat/completions", {"model": "tiny", "max_tokens": 2, **body}))
        report = said["kv_transfer_params"]["pic"]
        assert (report["state"], report["chunks"], report["problem"]) == ("linked", len(texts), None)
    return len(bodies)


def echoes(world: rig.World, url: str, answered: Answered) -> int:
    """Completions that repeat their prompts, greedily; returns how many were linked.

    With `logprobs` vLLM computes the whole prompt, and the response says so.
    """
    cases, count = rig.mixed(world, answered.per_cell, head="<s>"), Count()
    for case in cases:
        body = completion(case, echo=True, logprobs=None, return_token_ids=True)
        if case.params is None:
            body["kv_transfer_params"] = {"pic": False}
        response = json.loads(post(f"{url}/v1/completions", body))
        (choice,) = response["choices"]
        tokens = choice["token_ids"]
        wanted = case.logprobs(tokens)
        assert choice["prompt_token_ids"] == case.tokens
        state = (response["kv_transfer_params"] or {}).get("pic", {}).get("state")
        assert state == (None if case.params is None else "linked")
        count.add(state == "linked", float((wanted.max(-1).values - wanted[range(len(tokens)), tokens]).max()))
    assert count.difference <= rig.TOLERANCE
    answered.record("echo", count)
    text = json.loads(post(f"{url}/v1/completions", completion(world.exact(), prompt="Why?", echo=True, logprobs=None)))
    assert text["choices"][0]["text"].startswith("Why?")
    response = json.loads(post(f"{url}/v1/completions", completion(world.case("naive", seed=1), echo=True)))
    report = response["kv_transfer_params"]["pic"]
    assert report["state"] == "exact" and "log-probabilities of the prompt" in report["problem"]
    return count.linked


def wait_for_index() -> None:
    time.sleep(3)  # refresh_s and a little


def fails(world: rig.World, url: str) -> None:
    case, exact = world.case("naive", seed=5), world.exact(seed=5)
    assert case.params is not None
    world.store.path(case.params["pic"]["chunks"][0]["key"]).unlink()
    said = json.loads(post(f"{url}/v1/completions", completion(case)))
    require_same(exact, top_logprobs(said["choices"][0]["logprobs"]))
    assert said["kv_transfer_params"]["pic"]["state"] == "exact"
