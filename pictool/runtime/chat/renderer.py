"""Rendering chat templates in a process of their own, which is ended where one takes too long or too much memory.

A template is a program that comes with a model. jinja2's sandbox keeps it from files and from Python's internals, but
bounds neither time nor memory: `'x' * 10**10`, `10**10**9` (computed while it is compiled), nested loops, and many
filters are enough to hang a process. So a bounded process renders. It starts in 0.15 s when the first chat is rendered,
and stays: a prompt then costs less than a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pictool.bounded_process import BoundedProcess, ProcessFailure
from pictool.runtime.chat.renderer_process import LIMIT_BYTES, LIMIT_S


class TemplateFailure(Exception):
    """A template that cannot be rendered; says why."""


class TemplateRefusal(Exception):
    """What a template says of messages that it does not take (`raise_exception`)."""


class Renderer:
    """Renders chat templates. One process does it for all threads."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._process = BoundedProcess("pictool.runtime.chat.renderer_process", limit_s, LIMIT_BYTES)

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None, documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        """The text of a chat, up to where its answer begins.

        Args:
            variables: what the template knows beside the messages (the special tokens).
            tools: descriptions of the tools that the model may call.
            documents: for templates that print some.

        Raises:
            TemplateRefusal: the template does not take these messages.
            TemplateFailure: it is not valid, fails, or takes more than `limit_s` or `LIMIT_BYTES`.
        """
        request = {
            "template": template, "messages": list(messages), "variables": dict(variables), "tools": tools,
            "documents": documents,
        }  # fmt: skip
        try:
            reply = self._process.ask(request)
        except ProcessFailure as error:
            raise TemplateFailure(str(error)) from error
        if "refusal" in reply:
            raise TemplateRefusal(reply["refusal"])
        if "failure" in reply:
            raise TemplateFailure(reply["failure"])
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        self._process.close()
