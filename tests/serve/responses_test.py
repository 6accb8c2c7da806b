"""OpenAI's Responses, spoken by its official client."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pictool.serve.kept import KeptResponse, KeptResponses
from serve.live import DOCS, END, NAME, QUESTION, Live, Script, text_of

TOOLS: list[Any] = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
]
CALL = '<call>{"name": "look", "arguments": {"at": "the harbour"}}</call>'
ASK: dict[str, Any] = {"model": NAME, "input": QUESTION, "temperature": 0, "max_output_tokens": 8}


@pytest.fixture
def client(speaking: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="key-of-a", max_retries=0) as client:
        yield client


def without_ids(response: Any) -> Any:
    """What a response has that another one of the same request has, too."""
    found = response.model_dump()
    for item in (found, *found["output"]):
        item.pop("id", None)
        item.pop("call_id", None)
    return found | {"created_at": 0}


# Answers


@pytest.mark.parametrize("policy", ["full", "legolink-4"])
def test_an_answer_is_that_of_a_chat(client: openai.OpenAI, speaking: Live, policy: str) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": doc, "prompt_cache_breakpoint": {"mode": "explicit"}} for doc in DOCS
    ]
    content: list[dict[str, Any]] = [*parts, {"type": "text", "text": QUESTION}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    want = speaking.chat(None, messages=messages, pic={"policy": policy})
    given: Any = [{"role": "user", "content": [part | {"type": "input_text"} for part in content]}]
    ask = ASK | {"input": given, "instructions": "Be brief.", "extra_body": {"pic": {"policy": policy}}}
    got = client.responses.create(**ask)
    assert got.output_text == text_of(want) and got.usage is not None
    counted = client.responses.input_tokens.count(model=NAME, input=given, instructions="Be brief.")
    assert got.usage.input_tokens == want["usage"]["prompt_tokens"] == counted.input_tokens
    assert got.usage.input_tokens_details.cached_tokens == want["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert got.status == ("incomplete" if want["choices"][0]["finish_reason"] == "length" else "completed")
    last: Any = list(client.responses.create(stream=True, **ask))[-1]
    assert without_ids(last.response) == without_ids(got)


def test_events_come_in_their_order(client: openai.OpenAI, script: Script) -> None:
    text = f"<think>Where?</think>\n\nI look. {CALL}{END}"
    script.says(text, text)
    ask = ASK | {"tools": TOOLS, "max_output_tokens": 200, "store": False}
    events = list(client.responses.create(stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    item, part = "response.output_item", "response.content_part"
    texts, calls = "response.output_text", "response.function_call_arguments"
    names = [event.type for event in events]
    assert [name for name, before in zip(names, ["", *names], strict=False) if name != before] == [
        "response.created", "response.in_progress",
        f"{item}.added", f"{part}.added", "response.reasoning_text.delta", "response.reasoning_text.done",
        f"{part}.done", f"{item}.done",
        f"{item}.added", f"{part}.added", f"{texts}.delta", f"{texts}.done", f"{part}.done", f"{item}.done",
        f"{item}.added", f"{calls}.delta", f"{calls}.done", f"{item}.done", "response.completed",
    ]  # fmt: skip
    last: Any = events[-1]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [entry.model_dump() for entry in done] == [entry.model_dump() for entry in last.response.output]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [entry.id for entry in done]
    whole = client.responses.create(**ask)
    assert without_ids(whole) == without_ids(last.response)
    reasoning, message, call = whole.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and reasoning.content[0].text == "Where?"
    assert message.type == "message" and whole.output_text == "I look."
    assert call.type == "function_call" and json.loads(call.arguments) == {"at": "the harbour"}


@pytest.mark.parametrize("text", [CALL, "words " * 30, "<think>where " * 10])
def test_a_cut_answer_is_incomplete(client: openai.OpenAI, script: Script, text: str) -> None:
    script.says(text, text)
    ask = ASK | {"tools": TOOLS, "max_output_tokens": 20}
    whole, last = client.responses.create(**ask), list(client.responses.create(stream=True, **ask))[-1]
    assert last.type == "response.incomplete" and whole.status == "incomplete"
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    (item,) = whole.output
    assert item.type in ("message", "reasoning") and item.status == "incomplete"
    assert without_ids(last.response) == without_ids(whole)


def test_logprobs(client: openai.OpenAI) -> None:
    got = client.responses.create(**ASK, top_logprobs=2, include=["message.output_text.logprobs"])
    part: Any = got.output[0].content[0]  # type: ignore[union-attr, index]
    assert len(part.logprobs) > 1 and len(part.logprobs[0].top_logprobs) == 2


# Conversations


def test_a_history_by_id_has_the_tokens_of_its_items(client: openai.OpenAI, script: Script) -> None:
    first_text = f"<think>Where?</think>I look. {CALL}{END}"
    script.says(first_text, f"A boat.{END}", f"Yes.{END}")
    ask = ASK | {"tools": TOOLS, "max_output_tokens": 200}
    first = client.responses.create(**ask)
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "A boat."}  # type: ignore[union-attr]
    by_id: Any = {"model": NAME, "previous_response_id": first.id, "input": [result], "tools": TOOLS}
    items: Any = [{"role": "user", "content": QUESTION}, *(item.model_dump() for item in first.output), result]
    counts = [
        client.responses.input_tokens.count(**by_id), client.responses.input_tokens.count(
            model=NAME, input=items, tools=TOOLS
        ),
    ]  # fmt: skip
    assert counts[0].input_tokens == counts[1].input_tokens
    second = client.responses.create(**by_id)
    assert second.usage is not None and second.usage.input_tokens == counts[0].input_tokens
    client.responses.delete(first.id)
    third = client.responses.create(model=NAME, previous_response_id=second.id, input="And now?")
    assert third.usage is not None and third.usage.input_tokens > second.usage.input_tokens


def test_an_item_by_its_id_is_the_item(client: openai.OpenAI, script: Script, speaking: Live) -> None:
    """As Vercel's `ai` names the items of a kept response."""
    script.says(f"<think>Where?</think>I look. {CALL}{END}")
    first = client.responses.create(**ASK | {"tools": TOOLS, "max_output_tokens": 200})
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "A boat."}  # type: ignore[union-attr]
    ask: list[Any] = [{"role": "user", "content": QUESTION}]
    items = [*ask, *(item.model_dump() for item in first.output), result]
    named: list[Any] = [*ask, *({"type": "item_reference", "id": item.id} for item in first.output), result]
    counts = [client.responses.input_tokens.count(model=NAME, input=given, tools=TOOLS) for given in (items, named)]
    assert counts[0].input_tokens == counts[1].input_tokens
    script.says(f"A boat.{END}")
    second = client.responses.create(model=NAME, input=named, tools=TOOLS)
    assert second.usage is not None and second.usage.input_tokens == counts[0].input_tokens
    with speaking.client_of("key-of-b") as other:  # another tenant's is as unknown as any
        refused = other.post("/v1/responses", json=ASK | {"input": named})
    assert refused.status_code == 400 and "is not stored" in refused.json()["error"]["message"]


def test_calls_are_rendered_as_those_of_a_chat(client: openai.OpenAI, speaking: Live) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    chat = [
        {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "A boat."}, {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    items: Any = [
        chat[0], {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "A boat."}, chat[3],
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look", "parameters": TOOLS[0]["parameters"]}}]
    want = speaking.chat(None, messages=chat, tools=tools)["usage"]["prompt_tokens"]
    assert client.responses.input_tokens.count(model=NAME, input=items, tools=TOOLS).input_tokens == want


def test_responses_are_kept_shown_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK)
    assert client.responses.retrieve(made.id).output == made.output
    asked = client.responses.input_items.list(made.id).data
    assert asked[0].content[0].text == QUESTION and asked[0].id  # type: ignore[union-attr, index]
    client.responses.delete(made.id)
    unkept = client.responses.create(**ASK, store=False)
    for name in (made.id, unkept.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


def test_lost_ids_are_the_same_for_whoever_asks(client: openai.OpenAI, speaking: Live) -> None:
    deleted, foreign = client.responses.create(**ASK).id, client.responses.create(**ASK).id
    client.responses.delete(deleted)
    said = set[tuple[Any, ...]]()
    for name, key in ((deleted, "key-of-a"), (foreign, "key-of-b"), ("resp_" + "0" * 24, "key-of-a")):
        with speaking.client_of(key) as other:
            answers = [other.get(f"/v1/responses/{name}"), other.delete(f"/v1/responses/{name}"),
                       other.get(f"/v1/responses/{name}/input_items"),
                       other.post("/v1/responses", json=ASK | {"previous_response_id": name})]  # fmt: skip
            assert [answer.status_code for answer in answers] == [404, 404, 404, 400]
            assert answers[-1].json()["error"]["code"] == "previous_response_not_found"
            said.add(tuple(answer.text.replace(name, "X") for answer in answers))
    assert len(said) == 1


def test_what_is_kept_has_a_budget_and_a_lifetime() -> None:
    now, kept = [0.0], KeptResponses(lambda: now[0], max_bytes=12000, lifetime_s=10)
    for number in range(10):
        kept.add("a", response(number, 1000), [{"n": number}])
    assert [kept.find("a", str(number)) is not None for number in range(10)] == [False] * 6 + [True] * 4
    assert kept.find("b", "9") is None
    kept.remove("b", "9")
    assert kept.find("a", "9") is not None
    kept.remove("a", "9")
    assert kept.find("a", "9") is None
    now[0] = 11
    assert kept.find("a", "8") is None and kept.num_bytes("a") > 0
    kept.add("a", response(10, 1), [])
    assert kept.num_bytes("a") < 3000, "what has expired goes with the next response"


def test_what_responses_follow_is_counted_once_and_while_they_hold_it() -> None:
    """Fields that no template shows are counted, too."""
    kept, limit = KeptResponses(lambda: 0.0, max_bytes=50_000), 50_000
    alive: weakref.WeakSet[KeptResponse] = weakref.WeakSet()
    for number in range(20):
        previous = kept.find("a", str(number - 1))
        kept.add("a", response(number, 1000), [{"id": f"i{number}", "unknown": "x" * 5000}], previous)
        if made := kept.find("a", str(number)):
            alive.add(made)
            assert len(made.history) == (0 if previous is None else len(previous.history)) + 2
        assert sum(turn.num_bytes for turn in alive) <= kept.num_bytes("a") <= limit
        del previous, made
        assert len(alive) <= 7
    named = [number for number in range(20) if kept.find("a", str(number))]
    kept.add("a", response("huge", limit), [])
    assert kept.find("a", "huge") is None, "what is too large takes no other's place"
    last = kept.find("a", str(named[-1]))
    for number in named[:-1]:
        kept.remove("a", str(number))
    assert last is not None and last.history[0]["id"] == f"i{named[-1] - len([*last.chain()]) + 1}"
    del last
    kept.remove("a", str(named[-1]))
    assert kept.num_bytes("a") == 0 and not alive


def response(name: object, num_letters: int) -> dict[str, Any]:
    return {"id": str(name), "output": [{"id": f"o{name}", "x": "y" * num_letters}]}


# Fields


def test_what_agents_send_is_taken(client: openai.OpenAI, script: Script) -> None:
    """As codex does: tools of other kinds, a cache key, encrypted reasoning, a developer's texts."""
    script.says(f"Well.{END}")
    given: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": QUESTION},
    ]  # fmt: skip
    tools: Any = [*TOOLS, {"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}]
    got = client.responses.create(
        model=NAME, input=given, tools=tools, store=False, prompt_cache_key="k", parallel_tool_calls=False,
        include=["reasoning.encrypted_content"], reasoning={"effort": "low"}, tool_choice="auto", stream=False,
    )  # fmt: skip
    assert got.output_text == "Well."


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"), ({"conversation": "x"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"), ({"input": [{"role": "user"}]}, "content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "arguments"), ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "no-call", "output": "x"}]}, "no-call"),
    ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "'web_search'"),
    ({"prompt_cache_options": {"ttl": "2h"}}, "ttl"), ({"max_output_tokens": 0}, "max_output_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "word"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_why(speaking: Live, change: dict[str, Any], word: str) -> None:
    for stream in (False, True):
        response = speaking.client.post("/v1/responses", json=ASK | {"stream": stream} | change)
        assert response.status_code in (400, 422) and word in response.json()["error"]["message"], response.text


def test_a_marked_part_is_leased(client: openai.OpenAI, speaking: Live) -> None:
    part = {"type": "input_text", "text": DOCS[0] * 2, "prompt_cache_breakpoint": {"mode": "explicit"}}
    given: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": QUESTION}]}]
    options: Any = {"mode": "explicit", "ttl": "30m"}
    first = client.responses.create(**ASK | {"input": given}, prompt_cache_options=options)
    assert first.usage is not None and first.usage.input_tokens_details.cache_write_tokens > 0
    lease = speaking.ok("GET", "/v1/caches")["data"][0]
    assert lease["display_name"] == "marked" and 1700 < lease["expires_at"] - lease["created_at"] <= 1800
