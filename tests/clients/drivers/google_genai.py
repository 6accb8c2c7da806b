from __future__ import annotations

import json
from typing import Any

from cells import ABOUT, ASK, CUT, DOCUMENT, HELLO, LOOK, MODEL, PLACE, SCHEMA, THINK, URL, report
from google import genai
from google.genai import types

client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=URL))
TOOLS: Any = [
    types.Tool(
        function_declarations=[types.FunctionDeclaration(name="look", description=ABOUT, parameters_json_schema=PLACE)]
    )
]


def ask(text: str, model: str = MODEL, **config: Any) -> Any:
    return client.models.generate_content(
        model=model, contents=text, config=types.GenerateContentConfig(max_output_tokens=60, **config)
    )


def answer() -> Any:
    done = ask(HELLO)
    return {"text": done.text, "input": done.usage_metadata.prompt_token_count}


def stream() -> Any:
    parts = client.models.generate_content_stream(model=MODEL, contents=HELLO)
    return {"pieces": [part.text for part in parts if part.text]}


def tools() -> Any:
    return ask(LOOK, tools=TOOLS)


def reasoning() -> Any:
    return {"text": ask(THINK).text}


def structured() -> Any:
    return {"value": json.loads(ask(ASK, response_mime_type="application/json", response_json_schema=SCHEMA).text)}


def documents() -> Any:
    content: Any = [types.Content(role="user", parts=[types.Part(text=DOCUMENT)])]
    cache = client.caches.create(model=MODEL, config=types.CreateCachedContentConfig(contents=content, ttl="300s"))
    return {"cached": ask(ASK, cached_content=cache.name).usage_metadata.cached_content_token_count}


def cut() -> Any:
    return ask(CUT, tools=TOOLS)


def error() -> Any:
    return ask(HELLO, model="nope")


report(answer=answer, stream=stream, tools=tools, reasoning=reasoning, structured=structured, documents=documents,
       cut=cut, error=error)  # fmt: skip
