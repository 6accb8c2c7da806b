"""LangChain's ChatOpenAI (chat, Responses) and ChatAnthropic: `python langchain_models.py KIND`."""

from __future__ import annotations

import sys
from typing import Any

from cells import ASK, CACHE, CUT, DOCUMENT, FUNCTION, HELLO, LOOK, MODEL, SCHEMA, SEEN, THINK, URL, report
from langchain_core.messages import HumanMessage, ToolMessage

KIND = sys.argv[1]
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


def model(name: str = MODEL) -> Any:
    if KIND == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(base_url=URL, api_key="none", model_name=name, max_tokens=60, max_retries=0)  # type: ignore
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=name, max_tokens=60, max_retries=0,
                      use_responses_api=KIND == "responses")  # type: ignore  # fmt: skip


def answer() -> Any:
    done = model().invoke(HELLO)
    return {"text": str(done.text), "input": done.usage_metadata["input_tokens"]}


def stream() -> Any:
    return {"pieces": [piece for part in model().stream(HELLO) if (piece := str(part.text))]}


def tools() -> Any:
    bound = model().bind_tools(TOOLS)
    first = bound.invoke(LOOK)
    (call,) = first.tool_calls
    last = bound.invoke([HumanMessage(LOOK), first, ToolMessage(SEEN, tool_call_id=call["id"])])
    return {"call": [call["name"], call["args"]], "text": str(last.text)}


def reasoning() -> Any:
    done = model().invoke(THINK)
    found = [block for block in done.content_blocks if block["type"] == "reasoning"]
    return {"reasoning": found[0].get("reasoning") if found else None, "text": str(done.text)}


def structured() -> Any:
    schema = {"title": "kind", "description": "A kind.", **SCHEMA}
    return {"value": model().with_structured_output(schema, method="json_schema").invoke(ASK)}


def documents() -> Any:
    if KIND == "chat":
        done = model().invoke(ASK, extra_body={"cache_ids": [CACHE]})
    else:
        marks = {"anthropic": {"cache_control": {"type": "ephemeral"}}, "responses": {}}
        part = {"type": "text", "text": DOCUMENT, **marks[KIND]}
        more = {"extra_body": {"cache_ids": [CACHE]}} if KIND == "responses" else {}
        given = [HumanMessage(ASK)] if more else [HumanMessage([part, {"type": "text", "text": ASK}])]
        done = model().invoke(given, **more)
    return {"cached": done.usage_metadata["input_token_details"]["cache_read"]}


def cut() -> Any:
    done = model().bind_tools(TOOLS).invoke(CUT)
    return {"calls": len(done.tool_calls) + len(done.invalid_tool_calls), "reason": str(done.response_metadata)}


def error() -> Any:
    return model("nope").invoke(HELLO)


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
