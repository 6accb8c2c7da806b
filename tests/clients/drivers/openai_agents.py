"""OpenAI's agents over chat and Responses: `python openai_agents.py KIND`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cells import ASK, CACHE, CUT, HELLO, LOOK, MODEL, SEEN, THINK, URL, report
from openai import AsyncOpenAI
from pydantic import BaseModel

KIND = sys.argv[1]
set_tracing_disabled(True)


class Kind(BaseModel, extra="forbid"):
    kind: Literal["harbour", "town"]


@function_tool
def look(at: str) -> str:
    """Look somewhere."""
    return SEEN


def agent(name: str = MODEL, settings: Any = None, **more: Any) -> Any:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    model: Any = OpenAIResponsesModel if KIND == "responses" else OpenAIChatCompletionsModel
    settings = ModelSettings(max_tokens=60, **(settings or {}))
    return Agent(name="x", model=model(model=name, openai_client=client), model_settings=settings, **more)


def run(one: Any, text: str) -> Any:
    return Runner.run_sync(one, text)


def answer() -> Any:
    done = run(agent(), HELLO)
    return {"text": done.final_output, "input": done.context_wrapper.usage.input_tokens}


def stream() -> Any:
    async def pieces() -> list[str]:
        events = Runner.run_streamed(agent(), HELLO).stream_events()
        raw = [e.data async for e in events if e.type == "raw_response_event"]
        return [data.delta for data in raw if data.type == "response.output_text.delta"]

    return {"pieces": asyncio.run(pieces())}


def tools() -> Any:
    done = run(agent(tools=[look]), LOOK)
    (call,) = (item.raw_item for item in done.new_items if item.type == "tool_call_item")
    return {"call": [call.name, json.loads(call.arguments)], "text": done.final_output}


def reasoning() -> Any:
    done = run(agent(), THINK)
    found = [item.raw_item for item in done.new_items if item.type == "reasoning_item"]
    parts = [part.text for item in found for part in (item.content or item.summary)]
    return {"reasoning": parts[0] if parts else None, "text": done.final_output}


def structured() -> Any:
    return {"value": run(agent(output_type=Kind), ASK).final_output.model_dump()}


def documents() -> Any:
    done = run(agent(settings={"extra_body": {"cache_ids": [CACHE]}}), HELLO)
    return {"cached": done.context_wrapper.usage.input_tokens_details.cached_tokens}


def cut() -> Any:
    done = run(agent(tools=[look]), CUT)
    calls = [item for item in done.new_items if item.type == "tool_call_item"]
    return {"calls": len(calls), "reason": str(done.final_output)[:10]}


def error() -> Any:
    return run(agent("nope"), HELLO)


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
