"""LiteLLM's completion over chat and Messages, and its responses: `python litellm_models.py KIND`."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from cells import ASK, CACHE, CUT, DOCUMENT, FUNCTION, HELLO, LOOK, MODEL, SCHEMA, SEEN, THINK, URL, report, user

KIND = sys.argv[1]
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
litellm.telemetry = False
litellm.suppress_debug_info = True


def ask(messages: Any, model: str = MODEL, **more: Any) -> Any:
    kind, base = ("openai", f"{URL}/v1") if KIND == "chat" else ("anthropic", URL)
    return litellm.completion(
        model=f"{kind}/{model}", api_base=base, api_key="none", messages=messages, max_tokens=60, num_retries=0,
        max_retries=0, **more,
    )  # fmt: skip


def answer() -> Any:
    done = ask(user(HELLO))
    return {"text": done.choices[0].message.content, "input": done.usage.prompt_tokens}


def stream() -> Any:
    return {"pieces": [piece for part in ask(user(HELLO), stream=True) if (piece := part.choices[0].delta.content)]}


def tools() -> Any:
    message = ask(user(LOOK), tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": SEEN}
    last = ask([*user(LOOK), message.model_dump(exclude_none=True), result], tools=TOOLS)
    return {"call": [call.function.name, json.loads(call.function.arguments)], "text": last.choices[0].message.content}


def reasoning() -> Any:
    message = ask(user(THINK)).choices[0].message
    return {"reasoning": message.reasoning_content, "text": message.content}


def structured() -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA, "strict": True}}
    return {"value": json.loads(ask(user(ASK), response_format=form).choices[0].message.content)}


def documents() -> Any:
    if KIND == "chat":
        usage = ask(user(ASK), extra_body={"cache_ids": [CACHE]}).usage
    else:
        marked = {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}}
        usage = ask(user([marked, {"type": "text", "text": ASK}])).usage
    return {"cached": usage.prompt_tokens_details.cached_tokens}


def cut() -> Any:
    choice = ask(user(CUT), tools=TOOLS).choices[0]
    return {"calls": len(choice.message.tool_calls or ()), "reason": choice.finish_reason}


def error() -> Any:
    return ask(user(HELLO), model="nope")


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
