"""Simon Willison's `llm`, which reads extra models from a file of YAML."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from cells import ASK, CUT, HELLO, LOOK, MODEL, SCHEMA, SEEN, THINK, URL, report

os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
entries = [
    {"model_id": name, "model_name": served, "api_base": f"{URL}/v1", "api_key_name": "here", "supports_tools": True,
     "supports_schema": True}
    for name, served in (("here", MODEL), ("nope", "nope"))
]  # fmt: skip
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps(entries))
import llm  # noqa: E402 (it reads where its files are)

model: Any = llm.get_model("here")
model.key = "none"


def look(at: str) -> str:
    """Look somewhere."""
    return SEEN


def answer() -> Any:
    done = model.prompt(HELLO, stream=False, max_tokens=60)
    return {"text": done.text(), "input": done.usage().input}


def stream() -> Any:
    return {"pieces": [piece for piece in model.prompt(HELLO, max_tokens=60) if piece]}


def tools() -> Any:
    calls: list[Any] = []
    chain = model.chain(
        LOOK, tools=[look], options={"max_tokens": 60}, after_call=lambda _, call, __: calls.append(call)
    )
    texts = [response.text() for response in chain.responses()]
    return {"call": [calls[0].name, calls[0].arguments], "text": texts[-1]}


def reasoning() -> Any:
    return {"reasoning": None, "text": model.prompt(THINK, max_tokens=60).text()}


def structured() -> Any:
    return {"value": json.loads(model.prompt(ASK, schema=SCHEMA, max_tokens=60).text())}


def cut() -> Any:
    done = model.prompt(CUT, tools=[look], max_tokens=60)
    return {"calls": len(done.tool_calls()), "reason": done.text()[:10]}


def error() -> Any:
    other: Any = llm.get_model("nope")
    other.key = "none"
    return other.prompt(HELLO).text()


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, cut=cut, error=error)
