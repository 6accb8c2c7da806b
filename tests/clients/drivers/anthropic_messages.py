from __future__ import annotations

import json
from typing import Any

import anthropic
from cells import ABOUT, ASK, CUT, DOCUMENT, HELLO, LOOK, MODEL, PLACE, SCHEMA, SEEN, THINK, URL, report, user

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOLS: Any = [{"name": "look", "description": ABOUT, "input_schema": PLACE}]


def ask(messages: Any, **more: Any) -> Any:
    return client.messages.create(**({"model": MODEL, "messages": messages, "max_tokens": 60} | more))


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def answer() -> Any:
    done = ask(user(HELLO))
    return {"text": text(done), "input": done.usage.input_tokens + done.usage.cache_read_input_tokens}


def stream() -> Any:
    with client.messages.stream(model=MODEL, messages=user(HELLO), max_tokens=60) as events:
        return {"pieces": list(events.text_stream)}


def tools() -> Any:
    first = ask(user(LOOK), tools=TOOLS)
    (use,) = (block for block in first.content if block.type == "tool_use")
    result = [{"type": "tool_result", "tool_use_id": use.id, "content": SEEN}]
    last = ask([*user(LOOK), {"role": "assistant", "content": first.content}, *user(result)], tools=TOOLS)
    return {"call": [use.name, use.input], "text": text(last)}


def reasoning() -> Any:
    done = ask(user(THINK))
    return {"reasoning": done.content[0].thinking, "text": text(done)}


def structured() -> Any:
    done = ask(user(ASK), output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    return {"value": json.loads(text(done))}


def documents() -> Any:
    marked = {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}}
    return {"cached": ask(user([marked, {"type": "text", "text": ASK}])).usage.cache_read_input_tokens}


def cut() -> Any:
    done = ask(user(CUT), tools=TOOLS)
    return {"calls": sum(block.type == "tool_use" for block in done.content), "reason": done.stop_reason}


def error() -> Any:
    return ask(user(HELLO), model="nope")


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
