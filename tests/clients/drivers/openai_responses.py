from __future__ import annotations

import json
from typing import Any

import openai
from cells import ASK, CUT, DOCUMENT, FUNCTION, HELLO, LOOK, MODEL, SCHEMA, SEEN, THINK, URL, report, user

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
TOOLS: Any = [{"type": "function", "strict": True, **FUNCTION}]


def ask(given: Any, **more: Any) -> Any:
    return client.responses.create(**({"model": MODEL, "input": given, "max_output_tokens": 60} | more))


def answer() -> Any:
    done = ask(HELLO)
    return {"text": done.output_text, "input": done.usage.input_tokens}


def stream() -> Any:
    return {"pieces": [e.delta for e in ask(HELLO, stream=True) if e.type == "response.output_text.delta"]}


def tools() -> Any:
    first = ask(LOOK, tools=TOOLS)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": SEEN}
    last = ask([result], tools=TOOLS, previous_response_id=first.id)
    return {"call": [call.name, json.loads(call.arguments)], "text": last.output_text}


def reasoning() -> Any:
    done = ask(THINK)
    return {"reasoning": done.output[0].content[0].text, "text": done.output_text}


def structured() -> Any:
    form = {"format": {"type": "json_schema", "name": "kind", "schema": SCHEMA, "strict": True}}
    return {"value": json.loads(ask(ASK, text=form).output_text)}


def documents() -> Any:
    marked = {"type": "input_text", "text": DOCUMENT, "prompt_cache_breakpoint": {"mode": "explicit"}}
    usage = ask(user([marked, {"type": "input_text", "text": ASK}])).usage
    return {"cached": usage.input_tokens_details.cached_tokens}


def cut() -> Any:
    done = ask(CUT, tools=TOOLS)
    return {"calls": sum(item.type == "function_call" for item in done.output), "reason": done.status}


def error() -> Any:
    return ask(HELLO, model="nope")


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
