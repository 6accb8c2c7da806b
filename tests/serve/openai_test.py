"""OpenAI's API: forms, sampling, streams, errors; and answers that are those of `pic link`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import folders
import pytest

from pictool.api import answer
from pictool.core import Sampling
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.serve.errors import ApiError
from pictool.serve.files import Files
from pictool.serve.work import REASONS
from pictool.store.store import Store
from serve.live import DOCS, NAME, QUESTION, Live, text_of

COMPLETION = {"model": NAME, "prompt": "The harbour", "temperature": 0, "max_tokens": 6}


def events(live: Live, path: str, body: dict[str, Any], **more: Any) -> list[Any]:
    """The events of a stream, up to its end."""
    response = live.client.post(path, json=body | {"stream": True}, **more)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("policy", ["legolink-4", "naive", "cacheblend-30", "full", "prefix", "legolink-1"])
def test_answers_are_those_of_pic_link(live: Live, model: Model, tmp_path: Path, policy: str) -> None:
    files = [tmp_path / f"{i}.txt" for i in range(len(DOCS))]
    for file, doc in zip(files, DOCS, strict=True):
        file.write_text(doc, encoding="utf-8")
    parsed = parse_policy(policy)
    spec = Spec(QUESTION, files, parsed, "Be brief.", max_new_tokens=12)
    want = answer(model, Store(tmp_path / "other"), spec)
    parts = [{"type": "cache", "cache_id": live.cache(doc)} for doc in DOCS]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]},
    ]
    got = live.chat(None, messages=messages, max_tokens=12, pic={"policy": policy})
    assert text_of(got).strip() == want.text
    assert got["usage"]["prompt_tokens"] == want.link.layout.num_tokens
    if parsed.needs.objects:
        report, head = got["pic"], want.link.layout.starts[1]
        assert report["chunks"] == len(DOCS) and report["source"] == "cache"
        documents = sum(end - start for _, (start, end) in want.linked.documents)
        others = want.link.layout.num_context - documents  # the head and what separates the documents
        recomputed = want.link.recomputed - (others if parsed.check_layers(3) == () else 0)
        assert report["linked_tokens"] + report["recomputed_tokens"] == documents < want.link.layout.num_context - head
        assert policy == "cacheblend-30" or report["recomputed_tokens"] == pytest.approx(max(0, recomputed), abs=head)


def test_full_is_the_exact_answer_and_off_is_full(live: Live) -> None:
    plain = live.chat("".join(DOCS) + "\n\n" + QUESTION, pic=False)
    assert plain["pic"] == {
        "policy": "full", "chunks": 0, "exact_tokens": plain["usage"]["prompt_tokens"], "linked_tokens": 0,
        "recomputed_tokens": 0, "prefix_tokens": 0, "moved_tokens": 0, "source": "none", "reason": "policy",
        "hint": REASONS["policy"],
    }  # fmt: skip
    response = live.client.post(
        "/v1/chat/completions", headers={"X-Pic-Policy": "off"},
        json={"model": NAME, "temperature": 0, "max_tokens": 8,
              "messages": [{"role": "user", "content": "".join(DOCS) + "\n\n" + QUESTION}]},
    )  # fmt: skip
    assert text_of(response.json()) == text_of(plain) and response.json()["pic"] == plain["pic"]


def test_a_completion_is_the_models_own(live: Live, model: Model) -> None:
    want = answer(model, live.store, Spec.raw((), "The harbour", parse_policy("full")))
    got = live.ok("POST", "/v1/completions", json=COMPLETION | {"max_tokens": 64})
    assert got["choices"][0]["text"].strip() == want.text
    assert got["object"] == "text_completion" and got["id"].startswith("cmpl-")
    usage = got["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_streams_say_what_whole_answers_say(live: Live) -> None:
    body = {"model": NAME, "temperature": 0, "max_tokens": 9, "n": 2, "logprobs": True, "top_logprobs": 3}
    body |= {"messages": [{"role": "user", "content": QUESTION}]}
    whole = live.ok("POST", "/v1/chat/completions", json=body)
    parts = events(live, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    *parts, last = parts
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len({part["id"] for part in parts}) == 1 and {part["object"] for part in parts} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] and own[-2]["finish_reason"] is None
        tokens = [token for part in own if part["logprobs"] for token in part["logprobs"]["content"]]
        assert tokens == choice["logprobs"]["content"]
        assert all(token["top_logprobs"][0]["logprob"] >= token["logprob"] - 1e-6 for token in tokens)
    assert whole["choices"][0] | {"index": 1} == whole["choices"][1], "greedy"
    assert [part["pic"] for part in parts if "pic" in part] == [whole["pic"]]


def test_streams_of_completions(live: Live) -> None:
    body = COMPLETION | {"prompt": [[40, 41, 42], [50, 51]], "logprobs": 2}
    whole = live.ok("POST", "/v1/completions", json=body)
    parts = [part["choices"][0] for part in events(live, "/v1/completions", body)]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    for choice in whole["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) > 0


def test_sampling_is_repeatable_by_its_seed(live: Live) -> None:
    body = {"temperature": 1.5, "n": 3, "seed": 7, "max_tokens": 12}
    first, second = (live.chat(QUESTION, **body) for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert first["choices"] == second["choices"] and len(set(texts)) == 3
    assert text_of(live.chat(QUESTION, **(body | {"n": 1, "seed": 8}))) == texts[1]
    assert live.chat(QUESTION, **(body | {"seed": -7}))["choices"]


def test_stop_strings_end_an_answer(live: Live) -> None:
    whole = live.ok("POST", "/v1/completions", json=COMPLETION | {"max_tokens": 16})["choices"][0]
    assert whole["finish_reason"] == "length"
    stop = whole["text"][4:6]
    got = live.ok("POST", "/v1/completions", json=COMPLETION | {"max_tokens": 16, "stop": [stop, "zzz"]})["choices"][0]
    assert got == whole | {"text": whole["text"][: whole["text"].index(stop)], "finish_reason": "stop"}


@pytest.mark.parametrize("stop", [["ab"] * 17, ["é" * 2049], ["a" * 3000, "b" * 1097]], ids=["many", "long", "sum"])
def test_stop_strings_are_bounded_in_every_dialect(live: Live, stop: list[str]) -> None:
    whole: Any = stop if len(stop) > 1 else stop[0]
    link = {"query": QUESTION, "policy": {"algo": "full"}, "stop": stop}
    gemini = {"contents": [{"parts": [{"text": QUESTION}]}], "generationConfig": {"stopSequences": stop}}
    for path, body in (
        ("chat/completions", {"model": NAME, "messages": MESSAGES, "stop": whole}),
        ("completions", COMPLETION | {"stop": whole}), ("link", link), (f"models/{NAME}:generateContent", gemini),
    ):  # fmt: skip
        message = live.error(422, "POST", f"/v1/{path}", json=body)["message"]
        assert "stop" in message.lower()
        assert "valid" not in message.partition("after validation")[0]  # the bound, and not a type that it might have
    assert live.chat(QUESTION, stop=["a" * 4096], max_tokens=1)


def test_models_version_health_and_metrics(live: Live) -> None:
    (model,) = live.ok("GET", "/v1/models")["data"]
    assert model["id"] == NAME and live.ok("GET", f"/v1/models/{NAME}") == model
    assert live.ok("GET", "/version") == {"version": "test"}
    assert live.ok("GET", "/health")["status"] == "ok"
    live.chat(QUESTION)
    metrics = live.client.get("/metrics").text
    for name in ("pic_ttft_seconds_count", 'pic_tokens_total{kind="exact"}', "pic_waiting_requests 0.0"):
        assert name in metrics


def test_requests_have_ids(live: Live) -> None:
    sent = live.client.get("/version", headers={"X-Request-Id": "abc-1"})
    assert sent.headers["x-request-id"] == "abc-1"
    other = live.client.get("/nope", headers={"X-Request-Id": "with blanks and more"})
    assert other.headers["x-request-id"].startswith("req-")


MESSAGES = [{"role": "user", "content": QUESTION}]
WRONG: list[tuple[int, dict[str, Any], str]] = [
    (404, {"model": "gpt-4"}, "model"),
    (422, {"messages": []}, "messages"),
    (422, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    (422, {"temperature": -1}, "temperature"),
    (422, {"temperature": 1e-9, "top_p": 0}, "top_p"),
    (400, {"temperature": 1e-9}, "temperature"),
    (422, {"n": 0}, "n"),
    (400, {"stop": [""]}, "stop"),
    (422, {"frequency_penalty": 2.5}, "frequency_penalty"),
    (400, {"logit_bias": {"5": 101}}, "logit_bias: '5'"),
    (400, {"logit_bias": {"x": 1}}, "logit_bias: 'x'"),
    (400, {"logit_bias": {"320": 1}}, "from 0 to 319"),
    (400, {"logit_bias": {str(token): 1 for token in range(2000)}}, "at most 1024"),
    (400, {"response_format": {"type": "xml"}}, "response_format"),
    (400, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (400, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, 'keys: ["not"]'),
    (400, {"top_logprobs": 3}, "top_logprobs"),
    (400, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: "),
    (400, {"tools": [{}], "tool_choice": "required"}, "tool_choice"),
    (400, {"messages": [{"role": "user", "content": " "}]}, "question"),
    (400, {"messages": [{"role": "assistant", "content": "x"}]}, "user"),
    (400, {"messages": [{"role": "tool", "content": "x"}, *MESSAGES]}, "role"),
    (400, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "no-call"}, *MESSAGES]}, "no-call"),
    (400, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    (400, {"messages": [{"role": "user", "content": "word " * 600 + "?"}]}, "positions"),
    (404, {"cache_ids": ["cache-0"]}, "cache"),
    (404, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-0"}}]}]}, "file"),
    (400, {"pic": {"policy": "magic"}}, "policy"),
    (400, {"pic": {"policy": "speccache:spec_model=/etc"}}, "second model"),
    (422, {"pic": {"polixy": "x"}}, "pic"),
    (400, {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    (400, {"cache_ids": ["\udfff"]}, "surrogate"),
    (400, {"tools": [{"name": "\ud83d"}]}, "surrogate"),
    (422, {"max_tokens": True}, "max_tokens"),
    (422, {"max_tokens": "5"}, "max_tokens"),
    (422, {"temperature": "0.5"}, "temperature"),
    (422, {"temperature": False}, "temperature"),
    (422, {"presence_penalty": 10**400}, "presence_penalty"),
    (422, {"seed": 10**400}, "seed"),
    (422, {"logprobs": 1}, "logprobs"),
    (422, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
    (422, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}]}, "file_id"),
]


@pytest.mark.parametrize(("status", "change", "word"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_why(live: Live, status: int, change: dict[str, Any], word: str) -> None:
    body = json.dumps({"model": NAME, "messages": MESSAGES} | change)
    headers = {"Content-Type": "application/json"}
    error = live.error(status, "POST", "/v1/chat/completions", content=body.encode(), headers=headers)
    assert word in error["message"] and "\n" not in error["message"]
    body = json.dumps({"model": NAME, "messages": MESSAGES, "stream": True} | change)
    live.error(status, "POST", "/v1/chat/completions", content=body.encode(), headers=headers)


def test_other_errors_have_the_same_form(live: Live) -> None:
    live.error(404, "GET", "/v1/nothing")
    live.error(405, "GET", "/v1/chat/completions")
    for body, word in (
        (b"{", "line 1, column 2"),
        (b'{"a": 1}{}', "column 9: Extra data"),
        (b"\xff", "UTF-8"),
        (b"", "JSON"),
    ):
        error = live.error(
            400, "POST", "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert word in error["message"] and error["param"] is None
    live.error(415, "POST", "/v1/chat/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    live.error(400, "POST", "/v1/completions", json=COMPLETION | {"prompt": [1, 2, 99999]})
    live.error(400, "POST", "/v1/completions", json=COMPLETION | {"prompt": ""})
    live.error(400, "POST", "/v1/completions", json=COMPLETION | {"echo": True})
    huge = live.service.settings.max_body + 1
    live.error(413, "POST", "/v1/chat/completions", content=b" " * huge)
    error = live.error(413, "POST", "/v1/files", files={"file": ("a.txt", b"x" * huge)})
    assert error["type"] == "request_too_large"


ROUTES = [
    "/v1/chat/completions", "/v1/completions", "/v1/caches", "/v1/link", "/v1/query/execute", "/v1beta/cachedContents",
    f"/v1beta/models/{NAME}:generateContent",
]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_bodies_of_every_kind_that_are_no_requests(live: Live, path: str) -> None:
    """One that says no length, and one that is nested beyond any parser, beside numbers that are none."""
    json_type = {"Content-Type": "application/json"}
    block = b" " * (1 << 20)
    unmeasured = (block for _ in range(live.service.settings.max_body // len(block) + 1))
    assert live.error(413, "POST", path, content=unmeasured, headers=json_type)["message"]
    for body in (b"[" * 200_000, b'{"model": ' * 50_000, b'{"a": NaN}', b'{"model": 1e999}', b"null", b'"\\ud800"'):
        response = live.client.post(path, content=body, headers=json_type)
        assert response.status_code in (400, 404, 422), response.text
        assert response.json()["error"]["message"]


def test_files_are_kept_listed_used_and_removed(live: Live) -> None:
    names = [
        live.ok("POST", "/v1/files", files={"file": (f"{i}.txt", doc.encode())}, data={"purpose": "user_data"})["id"]
        for i, doc in enumerate(DOCS)
    ]
    listed = live.ok("GET", "/v1/files", params={"limit": 2})
    assert len(listed["data"]) == 2 and listed["has_more"]
    rest = live.ok("GET", "/v1/files", params={"after": listed["last_id"]})["data"]
    assert {file["id"] for file in [*listed["data"], *rest]} == set(names)
    assert live.client.get(f"/v1/files/{names[1]}/content").text == DOCS[1]
    assert live.ok("GET", f"/v1/files/{names[1]}")["filename"] == "1.txt"
    parts = [{"type": "file", "file": {"file_id": names[1]}}, {"type": "text", "text": QUESTION}]
    report = live.chat(parts)["pic"]
    assert (report["chunks"], report["source"]) == (1, "marker")
    assert live.ok("DELETE", f"/v1/files/{names[1]}")["deleted"]
    for method in ("GET", "DELETE"):
        live.error(404, method, f"/v1/files/{names[1]}")
    live.error(404, "GET", "/v1/files/..%2f..%2fstore.sqlite3/content")
    for data in (b"", b"\xff\xfe", b"a\0b"):
        live.error(400, "POST", "/v1/files", files={"file": ("a", data)})


def test_an_uploaded_pdf_is_its_text(live: Live) -> None:
    file = live.ok("POST", "/v1/files", files={"file": ("a.pdf", folders.pdf(["One.", "Two."]))})["id"]
    assert live.client.get(f"/v1/files/{file}/content").text == "One.\n\nTwo.\n"
    live.error(400, "POST", "/v1/files", files={"file": ("a.pdf", folders.pdf(["One."])[:99])})


def test_the_files_of_a_tenant_are_bounded_in_all(tmp_path: Path) -> None:
    files = Files(tmp_path, max_total=1000)
    for tenant in "ab":
        kept = files.add(tenant, "a.txt", "user_data", b"x" * 500)
        with pytest.raises(ApiError, match="1,000 bytes"):
            files.add(tenant, "b.txt", "user_data", b"x" * 500)
        assert files.remove(tenant, kept.id) and files.add(tenant, "b.txt", "user_data", b"x" * 500)


def test_a_verified_answer_says_how_far_it_is_from_full(live: Live) -> None:
    parts = [{"type": "cache", "cache_id": live.cache(doc)} for doc in DOCS]
    body = {"verify": True, "pic": {"policy": "naive"}}
    checked = live.chat([*parts, {"type": "text", "text": QUESTION}], **body)["pic"]["verify"]
    full = live.chat([*parts, {"type": "text", "text": QUESTION}], pic=False)
    assert checked["answer"] == text_of(full).strip() and checked["kl"] > 0
    exact = live.chat(QUESTION, verify=True)["pic"]["verify"]
    assert exact["kl"] == pytest.approx(0, abs=1e-9) and exact["same_answer"]
    stream = events(
        live, "/v1/chat/completions", {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 4} | body
    )
    assert stream[-1]["pic"]["verify"]["same_answer"]


def test_answers_at_once_are_those_of_one_after_another(live: Live) -> None:
    questions = [f"Really {i}?" for i in range(12)]
    want, got = [text_of(live.chat(question)) for question in questions], dict[int, str]()

    def ask(index: int) -> None:
        got[index] = text_of(live.chat(questions[index]))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(len(questions))] == want
    assert sampling_defaults_to_one()


def sampling_defaults_to_one() -> bool:
    from pictool.serve.prompts.requests import sampling_of
    from pictool.serve.schema import GenerationRequest

    return sampling_of(GenerationRequest(model=NAME, seed=3)) == Sampling(1.0, 1.0, 3)
