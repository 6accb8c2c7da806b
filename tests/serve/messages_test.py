"""Anthropic's Messages, spoken by its official client; and raw, where that client cannot say it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from reportlab.pdfgen.canvas import Canvas

from pictool.core import PromptText
from pictool.linker.grid import parse_policy
from pictool.serve.backends.base import BackendSettings
from pictool.serve.prompts.layout import pieces_of
from pictool.serve.service import ServiceSettings
from pictool.serve.work import ChatPrompt, MarkedText, Turn
from pictool.store.store import Store
from serve.live import DOCS, END, NAME, QUESTION, TEMPLATE, Live, Script, serving, text_of, tiny_model

TOOLS: list[Any] = [{"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}]
CALL = '<call>{"name": "look", "arguments": {"at": "the harbour"}}</call>'
ASK: dict[str, Any] = {"model": NAME, "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]}
COLD: dict[str, Any] = {"extra_body": {"temperature": 0}}


@pytest.fixture
def client(speaking: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=speaking.url, api_key="key-of-a", max_retries=0) as client:
        yield client


def marked(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"} | more}


# The same prompt, and the same answer


@pytest.mark.parametrize("policy", ["full", "legolink-4"])
def test_an_answer_is_that_of_a_chat(client: anthropic.Anthropic, speaking: Live, policy: str) -> None:
    documents = [{"type": "text", "text": doc, "cache_control": {"type": "ephemeral"}} for doc in DOCS]
    content: Any = [*documents, {"type": "text", "text": QUESTION}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    want = speaking.chat(None, messages=messages, pic={"policy": policy})
    ask: Any = {"system": "Be brief.", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    body = {"temperature": 0, "pic": {"policy": policy}}
    got = client.messages.create(model=NAME, extra_body=body, **ask)
    assert "".join(block.text for block in got.content if block.type == "text") == text_of(want)
    usage = got.usage
    total = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert total == want["usage"]["prompt_tokens"] == client.messages.count_tokens(
        model=NAME, system=ask["system"], messages=ask["messages"]
    ).input_tokens  # fmt: skip
    with client.messages.stream(model=NAME, extra_body=body, **ask) as stream:
        final = stream.get_final_message()
    assert [block.model_dump() for block in final.content] == [block.model_dump() for block in got.content]
    assert (final.stop_reason, final.usage.output_tokens) == (got.stop_reason, usage.output_tokens)


def test_both_credentials_are_taken_and_ids_come_back(speaking: Live) -> None:
    for headers in ({"x-api-key": "key-of-a"}, {"authorization": "Bearer key-of-a"}):
        response = httpx.post(f"{speaking.url}/v1/messages", json=ASK, headers=headers, timeout=60)
        assert response.status_code == 200 and response.headers["request-id"] == response.headers["x-request-id"]
    response = httpx.post(f"{speaking.url}/v1/messages", json=ASK, timeout=60)
    said = response.json()
    assert (
        response.status_code == 401 and said["type"] == "error" and said["request_id"] == response.headers["request-id"]
    )
    assert said["error"]["type"] == "authentication_error"


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME


# Streams


def test_events_come_in_their_order(client: anthropic.Anthropic, script: Script) -> None:
    text = f"<think>Where?</think>\n\nI look. {CALL}{END}"
    script.says(text, text)
    ask: Any = ASK | {"tools": TOOLS, "max_tokens": 200}
    names, blocks = list[str](), dict[int, dict[str, Any]]()
    for event in client.messages.create(stream=True, **ask):
        names.append(event.type)
        if event.type == "content_block_start":
            assert event.index == len(blocks)
            blocks[event.index] = event.content_block.model_dump() | {"json": ""}
        elif event.type == "content_block_delta":
            delta: Any = event.delta
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta.type, "json")
            blocks[event.index][name] += delta.partial_json if name == "json" else getattr(delta, name)
        elif event.type == "message_start":
            assert event.message.content == [] and event.message.usage.input_tokens > 0
        elif event.type == "message_delta":
            assert event.delta.stop_reason == "tool_use" and event.usage.output_tokens > 0
    each = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, before in zip(names, ["", *names], strict=False) if name != before] == [
        "message_start", *each * 3, "message_delta", "message_stop"
    ]  # fmt: skip
    whole = client.messages.create(**ask).content
    assert [block.type for block in whole] == ["thinking", "text", "tool_use"] == [b["type"] for b in blocks.values()]
    assert blocks[0]["thinking"] == "Where?" and blocks[1]["text"] == "I look."
    assert json.loads(blocks[2]["json"]) == whole[2].input == {"at": "the harbour"}  # type: ignore[union-attr]


def nulls_in(value: Any, path: str = "") -> set[str]:
    """The paths to the nulls in a value."""
    if isinstance(value, dict):
        return {found for name, inner in value.items() for found in nulls_in(inner, f"{path}.{name}")}
    if isinstance(value, list):
        return {found for inner in value for found in nulls_in(inner, f"{path}[]")}
    return {path} if value is None else set()


def test_fields_without_a_value_are_absent_as_anthropic_s(client: anthropic.Anthropic, script: Script) -> None:
    """Clients that check the schema refuse `citations: null`. The API has null for how an answer stopped."""
    text = f"<think>Where?</think>\n\nI look. {CALL}{END}"
    script.says(text, text)
    ask: Any = ASK | {"tools": TOOLS, "max_tokens": 200}
    with httpx.Client(base_url=str(client.base_url), headers={"x-api-key": client.api_key or ""}, timeout=60) as plain:
        answer = plain.post("/v1/messages", json=ask).json()
        lines = plain.post("/v1/messages", json=ask | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"] and len(events) > 9
    assert nulls_in({name: part for name, part in answer.items() if name != "pic"}) == {".stop_sequence"}
    shown = [{name: part for name, part in event.items() if name != "pic"} for event in events]
    allowed = {".message.stop_reason", ".message.stop_sequence", ".delta.stop_sequence"}
    assert set().union(*map(nulls_in, shown)) == allowed


@pytest.mark.parametrize(
    ("text", "more", "reason"),
    [
        (CALL, {"max_tokens": 20}, "max_tokens"), (CALL, {"stop_sequences": ["harbour"]}, "stop_sequence"),
        (CALL[:30] + END, {}, "end_turn"), ("<call>{broken</call>" + END, {}, "end_turn"),
    ],
)  # fmt: skip
def test_a_call_that_is_cut_is_text(
    client: anthropic.Anthropic, script: Script, text: str, more: dict[str, Any], reason: str
) -> None:
    script.says(text, text)
    ask: Any = ASK | {"tools": TOOLS, "max_tokens": 200} | more
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for got in (whole, streamed):
        block: Any = got.content[0]
        assert (
            len(got.content) == 1 and block.type == "text" and text.startswith(block.text) and got.stop_reason == reason
        )
        assert got.stop_sequence == (more["stop_sequences"][0] if reason == "stop_sequence" else None)


def test_thinking_may_be_left_out(client: anthropic.Anthropic, script: Script) -> None:
    script.says(f"<think>Where?</think>Here.{END}")
    got = client.messages.create(**ASK | {"max_tokens": 99, "thinking": {"type": "disabled"}})  # type: ignore[call-overload]
    assert [block.type for block in got.content] == ["text"]


def test_a_loop_of_calls(client: anthropic.Anthropic, script: Script, speaking: Live) -> None:
    """Calls and results are rendered as those of a chat; the official helper's messages come back as they were."""
    script.says(CALL + END, f"A boat.{END}")
    first = client.messages.create(**ASK | {"tools": TOOLS, "max_tokens": 99})  # type: ignore[call-overload]
    (use,) = first.content
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "A boat."}]}
    messages: Any = [
        *ASK["messages"], {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    second = client.messages.create(model=NAME, max_tokens=99, messages=messages, tools=TOOLS)
    assert second.stop_reason == "end_turn"
    call = {"id": use.id, "type": "function", "function": {"name": "look", "arguments": json.dumps(use.input)}}
    chat = [
        *ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": use.id, "content": "A boat."}, {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look", "parameters": TOOLS[0]["input_schema"]}}]
    want = speaking.chat(None, messages=chat, tools=tools)["usage"]["prompt_tokens"]
    assert client.messages.count_tokens(model=NAME, messages=messages, tools=TOOLS).input_tokens == want


# Documents


def pdf(text: str) -> str:
    out = io.BytesIO()
    canvas = Canvas(out)
    canvas.drawString(72, 720, text)
    canvas.save()
    return base64.b64encode(out.getvalue()).decode()


def test_documents_of_every_source(client: anthropic.Anthropic, speaking: Live) -> None:
    text = "The harbour was quiet and it holds a festival in the spring, and nobody knows why."
    file = speaking.ok("POST", "/v1/files", files={"file": ("a.txt", text.encode())})["id"]
    plain = base64.b64encode(text.encode()).decode()
    sources = [
        {"type": "text", "media_type": "text/plain", "data": text},
        {"type": "content", "content": [{"type": "text", "text": text}]}, {"type": "content", "content": text},
        {"type": "base64", "media_type": "text/plain", "data": plain}, {"type": "file", "file_id": file},
        {"type": "base64", "media_type": "application/pdf", "data": pdf(text)},
    ]  # fmt: skip
    counts = set()
    for source in sources:
        content: Any = [{"type": "document", "source": source}, {"type": "text", "text": QUESTION}]
        messages: Any = [{"role": "user", "content": content}]
        got = client.messages.create(model=NAME, max_tokens=2, messages=messages, **COLD)
        assert got.pic["chunks"] == 1  # type: ignore[attr-defined]
        counts.add(client.messages.count_tokens(model=NAME, messages=messages).input_tokens)
    assert len(counts) == 1
    for source, word in (
        ({"type": "url", "url": "http://x/y.pdf"}, "'url'"),
        ({"type": "base64", "media_type": "image/png"}, "image/png"),
        ({"type": "base64", "media_type": "application/pdf", "data": plain}, "PDF"),
        ({"type": "base64", "media_type": "text/plain", "data": "?"}, "source"),
        ({"type": "content", "content": [{"type": "image"}]}, "'image'"),
    ):  # fmt: skip
        messages = [{"role": "user", "content": [{"type": "document", "source": source}]}]
        with pytest.raises(anthropic.BadRequestError, match=word):
            client.messages.create(model=NAME, max_tokens=2, messages=messages)


# Markers


def test_marked_texts_are_leased_and_counted(client: anthropic.Anthropic, speaking: Live) -> None:
    def ask(*texts: Any) -> Any:
        content = [*texts, {"type": "text", "text": QUESTION}]
        return client.messages.create(model=NAME, max_tokens=2, messages=[{"role": "user", "content": content}], **COLD)

    def leases() -> list[Any]:
        return [entry for entry in speaking.ok("GET", "/v1/caches")["data"] if entry["display_name"] == "marked"]

    before, one, other = len(leases()), DOCS[0] * 2, DOCS[1] * 2
    first, second = ask(marked(one, ttl="1h")), ask(marked(one, ttl="1h"))
    assert first.usage.cache_creation_input_tokens > 0 and first.usage.cache_creation.ephemeral_1h_input_tokens > 0
    assert second.usage.cache_creation_input_tokens == 0 < second.usage.cache_read_input_tokens
    (lease,) = leases()[: len(leases()) - before]
    assert 3500 < lease["expires_at"] - lease["created_at"] <= 3600
    moved = ask(marked(one), marked(other))  # a marker that moves on compiles what is new
    assert 0 < moved.usage.cache_creation_input_tokens < first.usage.cache_creation_input_tokens * 2
    assert len(leases()) == before + 2
    source = {"type": "text", "media_type": "text/plain", "data": DOCS[2] * 2}
    ask({"type": "document", "source": source, "cache_control": {"type": "ephemeral", "ttl": "1h"}})
    assert len(leases()) == before + 3


def test_markers_on_every_kind_of_block(client: anthropic.Anthropic) -> None:
    mark: Any = {"type": "ephemeral"}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}, "cache_control": mark}
    result = {"type": "tool_result", "tool_use_id": "a", "content": DOCS[0], "cache_control": mark}
    messages: Any = [
        *ASK["messages"], {"role": "assistant", "content": [{"type": "text", "text": DOCS[1]}, use]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    ask: Any = {"model": NAME, "max_tokens": 2, "messages": messages, "tools": [TOOLS[0] | {"cache_control": mark}]}
    got = client.messages.create(**ask, **COLD)
    assert got.pic["chunks"] == 2  # type: ignore[attr-defined]
    top = client.messages.create(**ASK | {"messages": [{"role": "user", "content": DOCS[2]}]}, cache_control=mark)
    assert top.pic["chunks"] == 1


def test_a_marker_where_a_template_writes_json_is_none() -> None:
    """As Llama 3's does with what a tool says: the text is there, and no object of it."""
    written = TEMPLATE.replace(
        "{{ message.content | trim }}", "{{ message.content | tojson if message.role == 'tool' else message.content }}"
    )
    turns = (Turn("user", (MarkedText(DOCS[0]),)), Turn("tool", (MarkedText('say "x"'),)))
    pieces = pieces_of(tiny_model(written), ChatPrompt(turns))
    assert [piece for piece in pieces if isinstance(piece, MarkedText)] == [MarkedText(DOCS[0])]
    assert isinstance(pieces[-1], PromptText) and '"say \\"x\\""' in pieces[-1].text


def test_no_tokens_fill_the_cache(client: anthropic.Anthropic) -> None:
    content: Any = [marked(DOCS[2] * 3), {"type": "text", "text": QUESTION}]
    ask: Any = {"model": NAME, "messages": [{"role": "user", "content": content}]}
    filled = client.messages.create(max_tokens=0, **ask)
    assert filled.content == [] and filled.usage.output_tokens == 0 and filled.stop_reason == "max_tokens"
    assert (filled.usage.cache_creation_input_tokens or 0) > 0
    assert (client.messages.create(max_tokens=2, **ask).usage.cache_read_input_tokens or 0) > 0


def test_a_share_that_is_used_up_answers_all_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("small") / "store")
    with serving(tiny_model(TEMPLATE), store, service_settings=ServiceSettings(lease_bytes=1)) as live:
        body = ASK | {"messages": [{"role": "user", "content": [marked(DOCS[0]), marked(QUESTION)]}]}
        assert live.ok("POST", "/v1/messages", json=body)["usage"]["cache_creation_input_tokens"] > 0
        assert live.ok("GET", "/v1/caches")["data"] == []


def test_exact_answers_compile_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = BackendSettings(parse_policy("full"), refresh_s=3600)
    with serving(tiny_model(), Store(tmp_path_factory.mktemp("exact") / "store"), settings=settings) as live:
        body = ASK | {
            "messages": [{"role": "user", "content": [marked(DOCS[0]), {"type": "text", "text": "\n\nWhy?"}]}]
        }
        usage = live.ok("POST", "/v1/messages", json=body)["usage"]
        assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0


def test_tenants_share_nothing(speaking: Live) -> None:
    body = ASK | {"messages": [{"role": "user", "content": [marked(DOCS[1] * 4), {"type": "text", "text": QUESTION}]}]}
    usages = []
    for key in ("key-of-a", "key-of-a", "key-of-b"):
        with speaking.client_of(key) as client:
            usages.append(client.post("/v1/messages", json=body).json()["usage"])
    assert usages[0]["cache_creation_input_tokens"] == usages[2]["cache_creation_input_tokens"] > 0
    assert usages[1]["cache_creation_input_tokens"] == 0


# Refusals

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": None}, "max_tokens"),
    ({"top_k": 5}, "top_k"), ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics"),
    ({"mcp_servers": [{}]}, "mcp_servers"), ({"container": "x"}, "container"), ({"temperature": 3}, "temperature"),
    ({"context_management": {"edits": []}}, "context_management"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    ({"messages": [{"role": "assistant", "content": "Well"}]}, "prefilled"),
    ({"messages": [{"role": "user", "content": [marked("x", ttl="2h")]}]}, "ttl"),
    ({"tools": [{"name": "x"}]}, "input_schema"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "y"}}, "'y'"),
    ({"stop_sequences": [""]}, "stop"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "no-call"}]}]}, "no-call"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "word"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_why(
    client: anthropic.Anthropic, speaking: Live, change: dict[str, Any], word: str
) -> None:
    for stream in (False, True):
        response = speaking.client.post("/v1/messages", json=ASK | {"stream": stream} | change)
        said = response.json()
        assert response.status_code == 400 and said["type"] == "error", said
        assert said["error"]["type"] == "invalid_request_error" and word in said["error"]["message"]
    with pytest.raises(anthropic.NotFoundError, match="'x'"):
        client.messages.create(**ASK | {"model": "x"})  # type: ignore[call-overload]


def test_broken_json_is_400_and_a_missing_route_says_which_there_are(speaking: Live) -> None:
    response = speaking.client.post(
        "/v1/messages", content=b"{", headers={"content-type": "application/json"}
    )  # fmt: skip
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    said = speaking.client.post("/v1/messages/nothing", json={}).json()
    assert said["error"]["type"] == "not_found_error" and "/v1/messages/count_tokens" in said["error"]["message"]


def test_anthropics_own_tools_are_left_out(client: anthropic.Anthropic, script: Script) -> None:
    script.says(f"Well.{END}")
    tools: Any = [{"type": "web_search_20250305", "name": "web_search"}]
    got = client.messages.create(**ASK | {"tools": tools, "max_tokens": 99})  # type: ignore[call-overload]
    assert got.content[0].text == "Well."
