from __future__ import annotations

from typing import Any, Literal

from cells import ASK, CACHE, CUT, HELLO, LOOK, MODEL, SEEN, THINK, URL, report
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Kind(BaseModel, extra="forbid"):
    """A kind."""

    kind: Literal["harbour", "town"]


def look(at: str) -> str:
    """Look somewhere."""
    return SEEN


def model(name: str = MODEL, **more: Any) -> Any:
    return OpenAILike(
        model=name, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_tokens=60, max_retries=0, context_window=2048, **more,
    )  # fmt: skip


def said(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def answer() -> Any:
    done = model().chat([said(HELLO)])
    return {"text": done.message.content, "input": done.raw.usage.prompt_tokens}


def stream() -> Any:
    return {"pieces": [part.delta for part in model().stream_chat([said(HELLO)]) if part.delta]}


def tools() -> Any:
    tool = FunctionTool.from_defaults(look)
    first = model().chat_with_tools([tool], user_msg=LOOK)
    (call,) = model().get_tool_calls_from_response(first)
    result = ChatMessage(role="tool", content=SEEN, additional_kwargs={"tool_call_id": call.tool_id})
    last = model().chat_with_tools([tool], chat_history=[said(LOOK), first.message, result])
    return {"call": [call.tool_name, call.tool_kwargs], "text": last.message.content}


def reasoning() -> Any:
    done = model().chat([said(THINK)])
    found = [block.content for block in done.message.blocks if block.block_type == "thinking"]
    return {"reasoning": found[0] if found else None, "text": done.message.content}


def structured() -> Any:
    return {"value": model().as_structured_llm(Kind).chat([said(ASK)]).raw.model_dump()}


def documents() -> Any:
    done = model(additional_kwargs={"extra_body": {"cache_ids": [CACHE]}}).chat([said(ASK)])
    return {"cached": done.raw.usage.prompt_tokens_details.cached_tokens}


def cut() -> Any:
    done = model().chat_with_tools([FunctionTool.from_defaults(look)], user_msg=CUT)
    calls = model().get_tool_calls_from_response(done, error_on_no_tool_call=False)
    return {"calls": len(calls), "reason": done.raw.choices[0].finish_reason}


def error() -> Any:
    return model("nope").chat([said(HELLO)])


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
