"""pydantic-ai over chat, Responses and Messages: `python pydantic_models.py KIND`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from cells import ASK, CACHE, CUT, DOCUMENT, HELLO, LOOK, MODEL, SEEN, THINK, URL, report
from pydantic import BaseModel
from pydantic_ai import Agent, CachePoint, NativeOutput
from pydantic_ai.messages import ThinkingPart, ToolCallPart

KIND = sys.argv[1]


class Kind(BaseModel, extra="forbid"):
    kind: Literal["harbour", "town"]


def model(name: str = MODEL) -> Any:
    if KIND == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(name, provider=AnthropicProvider(base_url=URL, api_key="none"))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    return (OpenAIResponsesModel if KIND == "responses" else OpenAIChatModel)(name, provider=provider)


def agent(name: str = MODEL, **more: Any) -> Any:
    return Agent(model(name), model_settings={"max_tokens": 100}, retries=0, **more)


def answer() -> Any:
    done = agent().run_sync(HELLO)
    return {"text": done.output, "input": done.usage.input_tokens}


def stream() -> Any:
    async def pieces() -> list[str]:
        async with agent().run_stream(HELLO) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    return {"pieces": asyncio.run(pieces())}


def looking() -> Any:
    one = agent()

    @one.tool_plain
    def look(at: str) -> str:
        """Look somewhere."""
        return SEEN

    return one


def tools() -> Any:
    done = looking().run_sync(LOOK)
    (call,) = (part for m in done.all_messages() for part in m.parts if isinstance(part, ToolCallPart))
    return {"call": [call.tool_name, call.args_as_dict()], "text": done.output}


def reasoning() -> Any:
    done = agent().run_sync(THINK)
    found = [part for message in done.all_messages() for part in message.parts if isinstance(part, ThinkingPart)]
    raw = [(part.provider_details or {}).get("raw_content", [""])[0] for part in found]
    return {"reasoning": (found[0].content or raw[0]) if found else None, "text": done.output}


def structured() -> Any:
    form: Any = Kind if KIND == "anthropic" else NativeOutput(Kind)  # it knows of few models that they take schemas
    return {"value": agent(output_type=form).run_sync(ASK).output.model_dump()}


def documents() -> Any:
    if KIND == "anthropic":
        done = agent().run_sync([DOCUMENT, CachePoint(), ASK])
    else:
        done = agent().run_sync(ASK, model_settings={"max_tokens": 60, "extra_body": {"cache_ids": [CACHE]}})
    return {"cached": done.usage.cache_read_tokens}


def cut() -> Any:
    done = looking().run_sync(CUT)
    calls = [part for m in done.all_messages() for part in m.parts if isinstance(part, ToolCallPart)]
    return {"calls": len(calls), "reason": str(done.output)[:10]}


def error() -> Any:
    return agent("nope").run_sync(HELLO)


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
