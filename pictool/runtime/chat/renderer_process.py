"""The process that renders chat templates. `renderer.py` runs this file; it imports jinja2 and nothing of the package.

A request is a line of JSON: `template`, `messages`, `variables`, `tools`, `documents`. A reply is one too: `text`, or
`refusal` (what the template says with `raise_exception`), or `failure`. The process ends by itself where a template
takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
        return {"failure": "it takes too much memory"}
    except Exception as error:  # a template can raise anything
        message = " ".join(str(error).split())[:200]
        if type(error) is TemplateError:
            return {"refusal": message}
        return {"failure": f"{type(error).__name__}: {message}"}
    if len(text) > MAX_CHARACTERS:
        return {"failure": f"its text has more than {MAX_CHARACTERS} characters"}
    return {"text": text}


def serve(limit_s: float) -> None:
    """Answer requests until there are no more, each within `limit_s` seconds."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it computes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            reply = json.dumps(render(json.loads(line)))
        except MemoryError:
            reply = json.dumps({"failure": "it takes too much memory"})
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
