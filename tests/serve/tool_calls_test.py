"""Calls and reasoning in chats: parsed from the text of a model that says what it is told, whole and streamed alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pictool.runtime.chat.parsing import AnswerParser
from serve.live import END, NAME, RESPONSES, Live, Script

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}
]
CALL = '<call>{"name": "look", "arguments": {"at": "the harbour"}}</call>'
ASK: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Really?"}], "max_tokens": 200}


@pytest.fixture
def client(speaking: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="key-of-a", max_retries=0) as client:
        yield client


def answer(client: openai.OpenAI, script: Script, text: str, **more: Any) -> dict[str, Any]:
    """A message and why it ended, which must be the same whole and streamed."""
    script.says(text, text)
    (choice,) = client.chat.completions.create(**(ASK | {"tools": TOOLS} | more)).choices
    whole = choice.message
    calls = [(call.function.name, call.function.arguments) for call in whole.tool_calls or ()]  # type: ignore[union-attr]
    found = {
        "text": whole.content or "", "reasoning": getattr(whole, "reasoning_content", ""), "calls": calls,
        "reason": choice.finish_reason,
    }  # fmt: skip
    streamed: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "reason": None}
    for chunk in client.chat.completions.create(stream=True, **(ASK | {"tools": TOOLS} | more)):
        delta = chunk.choices[0].delta
        streamed["text"] += delta.content or ""
        streamed["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            assert call.index == len(streamed["calls"]) and call.function is not None and call.id
            streamed["calls"].append((call.function.name, call.function.arguments))
        streamed["reason"] = chunk.choices[0].finish_reason
    assert streamed == found
    return found


def test_a_call_is_one_and_reasoning_is_apart(client: openai.OpenAI, script: Script) -> None:
    found = answer(client, script, f"<think>Where is it?</think>\n\nI look. {CALL}{CALL}{END}")
    assert found["text"] == "I look." and found["reasoning"] == "Where is it?" and found["reason"] == "tool_calls"
    assert [(name, json.loads(given)) for name, given in found["calls"]] == [("look", {"at": "the harbour"})] * 2


@pytest.mark.parametrize(
    ("text", "more", "reason"),
    [
        (CALL, {"max_tokens": 20}, "length"),
        (CALL, {"stop": ["harbour"]}, "stop"),
        (CALL[:30] + END, {}, "stop"),
        (f"<call>{{broken</call>{END}", {}, "stop"),
        (f'<call>{{"name": "look"}}</call>{END}', {}, "stop"),
        (f'<call>{{"name": 5, "arguments": {{}}}}</call>{END}', {}, "stop"),
        (CALL + END, {"tools": []}, "stop"),
        (CALL + END, {"tool_choice": "none"}, "stop"),
    ],
)
def test_what_is_no_whole_call_is_text(
    client: openai.OpenAI, script: Script, text: str, more: dict[str, Any], reason: str
) -> None:
    found = answer(client, script, text, **more)
    assert not found["calls"] and found["text"].startswith("<call>") and found["reason"] == reason
    assert text.startswith(found["text"])


def test_a_call_before_the_limit_is_whole_and_the_answer_is_cut(client: openai.OpenAI, script: Script) -> None:
    found = answer(client, script, CALL + " and more " * 100)
    assert len(found["calls"]) == 1 and found["reason"] == "length"


STRICT: list[Any] = [
    {"type": "function", "function": TOOLS[0]["function"] | {"strict": True, "parameters": {
        "type": "object", "properties": {"at": {"type": "string", "maxLength": 11}}, "required": ["at"],
        "additionalProperties": False}}}
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "is_call"),
    [('{"at": "the harbour"}', True), ('{"at": "the harbours"}', False), ("{}", False), ('{"at": "", "by": 1}', False)],
)
def test_a_call_of_a_strict_tool_is_of_its_schema_or_text(
    client: openai.OpenAI, script: Script, arguments: str, is_call: bool
) -> None:
    text = f'<call>{{"name": "look", "arguments": {arguments}}}</call>'
    found = answer(client, script, text + END, tools=STRICT)
    assert bool(found["calls"]) == is_call and found["text"] == ("" if is_call else text)
    assert answer(client, script, text + END)["calls"]  # one of a tool that is not strict


def test_a_strict_tool_whose_schema_is_not_followed_is_refused(client: openai.OpenAI) -> None:
    for schema, word in (({"not": {}}, "not"), ({"$ref": "http://localhost/x"}, "localhost"), ("x", "schema")):
        tools: Any = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": schema}}]
        with pytest.raises(openai.BadRequestError, match=f"tools: .*{word}"):
            client.chat.completions.create(**ASK | {"tools": tools})


def test_reasoning_tokens_are_counted(client: openai.OpenAI, script: Script) -> None:
    counts = []
    for text in (f"I look.{END}", f"<think>Where is it?</think>I look.{END}", "<think>" + "where " * 100):
        script.says(text, text)
        usage = client.chat.completions.create(**ASK).usage
        streamed = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
        assert usage is not None and usage.completion_tokens_details is not None and streamed[-1].usage is not None
        assert streamed[-1].usage.completion_tokens_details == usage.completion_tokens_details
        counts.append((usage.completion_tokens_details.reasoning_tokens or 0, usage.completion_tokens))
    assert counts[0][0] == 0 < counts[1][0] < counts[1][1] and counts[2][0] == counts[2][1] == ASK["max_tokens"]


def test_calls_and_results_come_back(client: openai.OpenAI, script: Script, speaking: Live) -> None:
    found = answer(client, script, CALL + END)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": found["calls"][0][1]}}
    messages = [
        *ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "A boat."},
    ]  # fmt: skip
    assert answer(client, script, f"It is a boat.{END}", messages=messages)["text"] == "It is a boat."


def test_a_model_that_cannot_say_calls_takes_no_tools(live: Live) -> None:
    body = ASK | {"tools": TOOLS}
    assert "response_template" in live.error(400, "POST", "/v1/chat/completions", json=body)["message"]


DOUBLING: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}


@pytest.mark.parametrize(
    ("at", "more"),
    [
        ({"type": "string", "pattern": "^(a+)+$"}, {}),
        ({"$ref": "#/$defs/a0"}, {"$defs": DOUBLING | {"a40": {"type": "integer"}}}),
        ({"$ref": "#/$defs/a"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}}),
        ({}, {"patternProperties": {"^(b+)+$": False}}),
    ],
)
def test_a_strict_schema_that_is_costly_to_validate_costs_no_others_answer(
    at: dict[str, Any], more: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"at": at}, "additionalProperties": False} | more
    tool = {"type": "function", "function": {"name": "look", "strict": True, "parameters": schema}}
    other = AnswerParser(RESPONSES, "[assistant]", TOOLS, True)
    begun = other.feed(CALL[:20])
    call = json.dumps({"name": "look", "arguments": {"at": "a" * 40 + "b", "b" * 40 + "a": 1}})
    assert parsed(tool, call) == ["text"]
    assert [part.kind for part in [*begun, *other.feed(CALL[20:]), *other.end(END)]] == ["call"]


def parsed(tool: dict[str, Any], call: str) -> list[str]:
    """The kinds of the parts of an answer that is a call."""
    parser = AnswerParser(RESPONSES, "[assistant]", [tool], True)
    parts = [*parser.feed(f"<call>{call}</call>"), *parser.end(END)]
    assert parts[0].kind == "call" or "".join(part.text for part in parts) == f"<call>{call}</call>"
    return list(dict.fromkeys(part.kind for part in parts))


def test_a_strict_schema_with_patterns_is_validated_by_them() -> None:
    parameters = {
        "type": "object", "properties": {"at": {"type": "string", "pattern": r"\d{4}-\d{2}$"}},
        "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "look", "strict": True, "parameters": parameters}}
    for arguments, is_call in (
        ('{"at": "on 2026-11"}', True), ('{"at": "2026-11-28"}', False), ('{"x1": 5}', True), ('{"x1": "5"}', False),
        ('{"y": 5}', False), ("{}", True),
    ):  # fmt: skip
        call = f'{{"name": "look", "arguments": {arguments}}}'
        assert parsed(tool, call) == ["call" if is_call else "text"], arguments


@pytest.mark.parametrize(("depth", "kind"), [(50, "call"), (900, "text"), (5000, "text")])
def test_a_call_that_is_nested_too_deep_is_text(depth: int, kind: str) -> None:
    """Its client could not send it back."""
    assert parsed(TOOLS[0], f'{{"name": "look", "arguments": {{"at": {"[" * depth + "]" * depth}}}}}') == [kind]


def test_a_template_that_is_none_is_text() -> None:
    parser = AnswerParser({"fields": {}}, "", [], True)
    assert [part.text for part in [*parser.feed("text"), *parser.end(None)]] == ["text"]
