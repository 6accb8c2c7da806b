from __future__ import annotations

import json
from typing import Any

import openai
from cells import ASK, CACHE, CUT, FUNCTION, HELLO, LOOK, MODEL, SCHEMA, SEEN, THINK, URL, report, user

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


def ask(messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(**({"model": MODEL, "messages": messages, "max_tokens": 60} | more))


def answer() -> Any:
    done = ask(user(HELLO))
    return {"text": done.choices[0].message.content, "input": done.usage.prompt_tokens}


def stream() -> Any:
    pieces = [chunk.choices[0].delta.content for chunk in ask(user(HELLO), stream=True) if chunk.choices]
    return {"pieces": [piece for piece in pieces if piece]}


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
    usage = ask(user(ASK), extra_body={"cache_ids": [CACHE]}).usage
    return {"cached": usage.prompt_tokens_details.cached_tokens}


def cut() -> Any:
    choice = ask(user(CUT), tools=TOOLS).choices[0]
    return {"calls": len(choice.message.tool_calls or ()), "reason": choice.finish_reason}


def error() -> Any:
    return ask(user(HELLO), model="nope")


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
