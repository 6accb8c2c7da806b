"""The façade in Gemini's form, spoken raw; `google-genai` itself speaks it in clients_test.py."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from serve.live import DOCS, NAME, QUESTION, Live, text_of

ASK: dict[str, Any] = {
    "contents": [{"role": "user", "parts": [{"text": QUESTION}]}],
    "generationConfig": {"temperature": 0, "maxOutputTokens": 8},
}
MODEL = f"/v1beta/models/{NAME}"


def cached(live: Live, **more: object) -> str:
    body = {"model": f"models/{NAME}", "contents": [{"parts": [{"text": doc}]} for doc in DOCS], "ttl": "90s"} | more
    return str(live.ok("POST", "/v1beta/cachedContents", json=body)["name"])


def test_it_answers_as_the_other_api_does(live: Live) -> None:
    got = live.ok("POST", f"{MODEL}:generateContent", json=ASK)
    want = live.chat(QUESTION)
    (candidate,) = got["candidates"]
    assert candidate["content"]["parts"][0]["text"] == text_of(want)
    assert candidate["finishReason"] in ("STOP", "MAX_TOKENS")
    assert got["usageMetadata"]["promptTokenCount"] == want["usage"]["prompt_tokens"]
    lines = live.client.post(f"{MODEL}:streamGenerateContent", params={"alt": "sse"}, json=ASK).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    texts = [part["candidates"][0]["content"]["parts"][0]["text"] for part in parts]
    assert "".join(texts) == text_of(want) and "usageMetadata" in parts[-1]
    response = live.client.post(f"{MODEL}:streamGenerateContent", json=ASK)
    assert response.headers["content-type"] == "application/json"
    assert [part["candidates"] for part in response.json()] == [part["candidates"] for part in parts]
    whole = {"generateContentRequest": {"model": f"models/{NAME}", **ASK}}
    for body in (ASK, {"contents": ASK["contents"]}, whole):
        assert live.ok("POST", f"{MODEL}:countTokens", json=body) == {"totalTokens": want["usage"]["prompt_tokens"]}


def test_cached_contents_are_leases_of_the_same_objects(live: Live) -> None:
    name = cached(live, systemInstruction={"parts": [{"text": "Be brief."}]}, displayName="books")
    got = live.ok(
        "POST", f"{MODEL}:generateContent", json=ASK | {"cachedContent": name}, headers={"X-Pic-Policy": "full"}
    )
    names = [live.cache(doc) for doc in DOCS]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    want = live.chat(None, messages=messages, cache_ids=names, pic={"policy": "full"})
    assert got["candidates"][0]["content"]["parts"][0]["text"] == text_of(want)
    assert live.ok("POST", f"{MODEL}:generateContent", json=ASK | {"cachedContent": name})["pic"]["chunks"] == 4
    shown = live.ok("GET", f"/v1beta/{name}")
    assert shown["displayName"] == "books" and shown["usageMetadata"]["totalTokenCount"] > 50
    assert live.ok("GET", f"/v1/caches/{name.removeprefix('cachedContents/')}")["usage"]["objects"] == 4
    later = live.ok("PATCH", f"/v1beta/{name}", params={"updateMask": "ttl"}, json={"ttl": "900s"})
    assert later["expireTime"] > shown["expireTime"]
    live.ok("PATCH", f"/v1beta/{name}", json={"expireTime": later["expireTime"]})
    first = live.ok("GET", "/v1beta/cachedContents", params={"pageSize": 1})
    second = live.ok("GET", "/v1beta/cachedContents", params={"pageSize": 1, "pageToken": first["nextPageToken"]})
    assert first["cachedContents"][0]["name"] != second["cachedContents"][0]["name"]
    assert live.ok("DELETE", f"/v1beta/{name}") == {}
    assert live.error(404, "GET", f"/v1beta/{name}")["status"] == "NOT_FOUND"


def test_errors_have_geminis_form_too(live: Live) -> None:
    for status, path, body in (
        (404, "/v1beta/models/other:generateContent", ASK),
        (404, f"{MODEL}:generateContent", ASK | {"cachedContent": "cachedContents/cache-0"}),
        (400, f"{MODEL}:generateContent", {"contents": [{"parts": [{"inlineData": {}}]}]}),
        (422, f"{MODEL}:generateContent", {"contents": []}),
        (400, f"{MODEL}:generateContent", {"contents": [{"role": "model", "parts": [{"text": "x"}]}]}),
        (400, "/v1beta/cachedContents", {"model": NAME, "contents": []}),
        (422, "/v1beta/cachedContents", {"model": NAME, "contents": [], "ttl": "soon"}),
        (422, f"{MODEL}:streamGenerateContent?alt=media", ASK),
        (400, f"{MODEL}:countTokens", {}),
        (404, f"{MODEL}:embedContent", {"content": {}}),
    ):
        error = live.error(status, "POST", path, json=body)
        assert error["code"] == status and error["status"].isupper()
    live.error(400, "PATCH", f"/v1beta/{cached(live)}", json={})


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("", "tools", [{"googleSearch": {}}]), ("", "toolConfig", {"a": 1}), ("config", "responseSchema", {"a": 1}),
        ("config", "presencePenalty", 1), ("config", "responseLogprobs", True), ("config", "topK", 1),
        ("config", "responseMimeType", "application/json"), ("config", "temperature", True),
        ("part", "inlineData", {"data": "x"}),
    ],
)  # fmt: skip
def test_what_would_change_an_answer_is_refused_by_name(live: Live, where: str, field: str, value: object) -> None:
    body = copy.deepcopy(ASK)
    holders = {"": body, "config": body["generationConfig"], "part": body["contents"][0]["parts"][0]}
    holders[where][field] = value
    assert field in live.error(422, "POST", f"{MODEL}:generateContent", json=body)["message"]
    if field not in ("temperature", "responseMimeType"):
        holders[where][field] = type(value)()  # asks for nothing
        live.ok("POST", f"{MODEL}:generateContent", json=body)


def test_models_have_the_form_of_who_asks(live: Live) -> None:
    for headers in ({"x-goog-api-key": "x"}, {"x-goog-api-client": "google-genai-sdk"}):
        listed, shown = (live.ok("GET", path, headers=headers) for path in ("/v1/models", f"/v1/models/{NAME}"))
        assert listed["models"][0]["name"] == shown["name"] == f"models/{NAME}"
    assert live.ok("GET", "/v1/models")["data"][0]["id"] == live.ok("GET", f"/v1/models/{NAME}")["id"] == NAME
