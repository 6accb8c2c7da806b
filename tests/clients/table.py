"""The clients and what each does with each feature: the tests and the table of docs/reference/clients.md are of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FEATURES = ("answer", "stream", "tools", "reasoning", "structured", "documents", "cut", "error")


@dataclass(frozen=True)
class Client:
    """A client over one dialect.

    Fields:
        package: as its registry calls it. driver: of `drivers`, and its argument.
        is_apart: it demands openai before 3, so it lives in the developers' environment, with that.
        error: of its own classes, for a model that is not served.
        refused: features that the server refuses: the class of its error, and a word of the message.
        raised: features that the client ends by an error of its own, likewise.
        hidden: features that the client does not show, or has no way to say.
    """

    package: str
    dialect: str
    driver: str
    error: str
    is_apart: bool = False
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    raised: dict[str, tuple[str, str]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    @property
    def is_npm(self) -> bool:
        return ".mjs" in self.driver

    @property
    def name(self) -> str:
        """As tests call it."""
        package = re.sub(r"[^a-z]+", "-", self.package.removeprefix("@")).strip("-")
        return f"{package}{'-npm' if self.is_npm else ''}-{self.dialect.lower()}"

    @property
    def version(self) -> str:
        """The locked one."""
        if self.is_npm:
            text = (ROOT / "tests" / "clients" / "package-lock.json").read_text()
            found = re.search(rf'"node_modules/{re.escape(self.package)}": {{\s+"version": "([^"]+)"', text)
        else:
            text = (ROOT / f"constraints{'' if self.is_apart else '-clients'}.txt").read_text()
            found = re.search(rf"^{re.escape(self.package)}==(\S+)$", text, re.MULTILINE)
        assert found is not None, f"{self.package} is not locked"
        return found[1]

    def cell(self, feature: str) -> str:
        if feature in self.refused or feature in self.raised:
            return "refused" if feature in self.refused else "its error"
        return "not shown" if feature in self.hidden else "yes"


_THOUGHTS = frozenset({"reasoning"})  # they show summaries only, or none
_OF_GEMINI = {
    "tools": ("ClientError", "tools: is not supported"), "cut": ("ClientError", "tools: is not supported"),
    "structured": ("ClientError", "generationConfig.responseMimeType: Input should be 'text/plain'"),
}  # fmt: skip
CLIENTS = (
    Client("openai", "chat", "openai_chat.py", "NotFoundError"),
    Client("openai", "Responses", "openai_responses.py", "NotFoundError"),
    Client("anthropic", "Messages", "anthropic_messages.py", "NotFoundError"),
    Client("google-genai", "Gemini", "google_genai.py", "ClientError", refused=_OF_GEMINI, hidden=_THOUGHTS),
    Client("langchain-openai", "chat", "langchain_models.py chat", "OpenAIModelNotFoundError", hidden=_THOUGHTS),
    Client(
        "langchain-openai",
        "Responses",
        "langchain_models.py responses",
        "OpenAIModelNotFoundError",
        hidden=_THOUGHTS,
    ),
    Client("langchain-anthropic", "Messages", "langchain_models.py anthropic", "AnthropicModelNotFoundError"),
    Client("litellm", "chat", "litellm_models.py chat", "NotFoundError"),
    Client("litellm", "Messages", "litellm_models.py anthropic", "NotFoundError"),
    Client("llama-index-llms-openai-like", "chat", "llama_index_chat.py", "NotFoundError", is_apart=True),
    Client("llm", "chat", "llm_chat.py", "NotFoundError", is_apart=True, hidden=_THOUGHTS | {"documents"}),
    Client("pydantic-ai-slim", "chat", "pydantic_models.py chat", "ModelNotFoundError"),
    Client("pydantic-ai-slim", "Responses", "pydantic_models.py responses", "ModelNotFoundError"),
    Client("pydantic-ai-slim", "Messages", "pydantic_models.py anthropic", "ModelNotFoundError"),
    Client("openai-agents", "chat", "openai_agents.py chat", "NotFoundError"),
    Client(
        "openai-agents",
        "Responses",
        "openai_agents.py responses",
        "NotFoundError",
        raised={"cut": ("ModelBehaviorError", "response.incomplete")},
    ),
    Client("openai", "chat", "openai_chat.mjs", "NotFoundError"),
    Client("openai", "Responses", "openai_responses.mjs", "NotFoundError"),
    Client("@anthropic-ai/sdk", "Messages", "anthropic_messages.mjs", "NotFoundError"),
    Client("ai", "chat", "ai.mjs chat", "APICallError", hidden=_THOUGHTS),
    Client("ai", "Responses", "ai.mjs responses", "APICallError", hidden=_THOUGHTS),
    Client("ai", "Messages", "ai.mjs anthropic", "APICallError"),
)


def rows() -> Iterator[tuple[str, ...]]:
    """Of the table in the docs."""
    for client in CLIENTS:
        yield (
            f"`{client.package}` {client.version}{' (npm)' if client.is_npm else ''}",
            client.dialect,
            *map(client.cell, FEATURES),
        )
