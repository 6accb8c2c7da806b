"""The process that renders chat templates (`bounded_process.py`), which `renderer.py` starts. It imports jinja2.

A request has `template`, `messages`, `variables`, `tools`, `documents`. A reply has `text`, or `refusal` (what the
template says with `raise_exception`), or `failure`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pictool.bounded_process import TOO_MUCH_MEMORY, serve_requests

LIMIT_S = 3.0
LIMIT_BYTES = 512 << 20
MAX_CHARACTERS = 16 << 20


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks an answer for training: its content, as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@lru_cache(8)
def compile_template(template: str) -> Template:
    """A template in the environment that `transformers` has for chat templates (its `chat_template_utils.py`)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def render(request: dict[str, Any]) -> dict[str, str]:
    """The reply to a request."""
    try:
        text = compile_template(request["template"]).render(
            messages=request["messages"],
            tools=request.get("tools"),
            documents=request.get("documents"),
            add_generation_prompt=True,
            **request["variables"],
        )
    except MemoryError:
        return {"failure": TOO_MUCH_MEMORY}
    except Exception as error:  # a template can raise anything
        message = " ".join(str(error).split())[:200]
        if type(error) is TemplateError:
            return {"refusal": message}
        return {"failure": f"{type(error).__name__}: {message}"}
    if len(text) > MAX_CHARACTERS:
        return {"failure": f"its text has more than {MAX_CHARACTERS} characters"}
    return {"text": text}


if __name__ == "__main__":
    serve_requests(render, float(sys.argv[1]), int(sys.argv[2]))
