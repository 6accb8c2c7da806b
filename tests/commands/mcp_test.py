"""`pic mcp`: by the SDK's own client, over stdin and stdout of the program."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent

from commands.conftest import MORE, TEXT
from commands.run import pic, write

QUESTION = "Who knows why?"
Call = Callable[..., Awaitable[dict[str, Any]]]


def talk(steps: Callable[[Client], Awaitable[None]], *options: object) -> None:
    """Let a client take steps with `pic mcp`, which ends with it."""

    async def run() -> None:
        words = ["-m", "pictool", "-q", "mcp", *map(str, options)]
        async with Client(StdioServerParameters(command=sys.executable, args=words)) as client:
            await steps(client)

    asyncio.run(asyncio.wait_for(run(), 300))


@pytest.fixture
def talk_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As `talk`, with the server in this process: the model is known here, and nothing is imported again."""

    def talk_here(steps: Callable[[Client], Awaitable[None]], *options: object) -> None:
        def run(server: MCPServer, transport: str) -> None:
            async def talk() -> None:
                async with Client(server) as client:
                    await steps(client)

            asyncio.run(asyncio.wait_for(talk(), 300))

        monkeypatch.setattr(MCPServer, "run", run)
        assert pic("-q", "mcp", *options).code == 0

    return talk_here


async def call(client: Client, name: str, **arguments: Any) -> Any:
    """What a tool returns; of one that fails, its message."""
    result = await client.call_tool(name, arguments)
    assert isinstance(result, CallToolResult)
    (content,) = result.content
    assert isinstance(content, TextContent)
    if result.is_error:
        return content.text
    assert json.loads(content.text) == result.structured_content
    return result.structured_content


@pytest.fixture
def docs() -> Path:
    write("pages/a.md", f"# Harbour\n{TEXT}")
    write("pages/sub/b.md", f"# Numbers\n{MORE}")
    write("pages/noise.bin", bytes(range(256)))
    write("elsewhere/c.md", "A secret of another folder.\n")
    return Path("pages")


def test_an_agent_searches_and_asks(docs: Path, model: Path) -> None:
    options = ("-m", model, "--max-new-tokens", 4, "--algo", "legolink-2")
    alone = pic("ask", docs, "-q", QUESTION, *options, "--store", "other", "--json").json

    async def steps(client: Client) -> None:
        listed = (await client.list_tools()).tools
        assert all(value["description"] for tool in listed for value in tool.input_schema["properties"].values())
        tools = {tool.name: tool.description or "" for tool in listed}
        assert [*tools] == ["search", "ask"] and all(tools.values())
        (found,) = (await call(client, "search", words="numbers"))["passages"]
        assert found["path"] == "pages/sub/b.md" and MORE.strip() in found["text"]

        asked = await call(client, "ask", question=QUESTION)
        assert asked == {"answer": alone["answer"], "sources": ["pages/a.md, Harbour"]}

    talk(steps, docs, *options)


def test_what_cannot_be_is_one_line_and_no_other_folder_is_read(
    docs: Path, model: Path, talk_here: Callable[..., None]
) -> None:
    async def steps(client: Client) -> None:
        assert (await call(client, "search", words="secret"))["passages"] == []
        assert "no passage contains" in await call(client, "ask", question="Zebra")
        assert "question" in await call(client, "ask")
        assert (await call(client, "ask", question=QUESTION))["sources"]  # it goes on

    talk_here(steps, docs, "-m", model, "--max-new-tokens", 2)


def test_a_name_that_is_not_utf_8_is_shown_escaped(docs: Path, model: Path, talk_here: Callable[..., None]) -> None:
    write(docs / os.fsdecode(b"caf\xe9.md"), "A windmill on the old quay.\n")

    async def steps(client: Client) -> None:
        (found,) = (await call(client, "search", words="windmill"))["passages"]
        assert found["path"] == r"pages/caf\udce9.md"
        assert (await call(client, "ask", question="windmill"))["sources"] == [found["path"]]

    talk_here(steps, docs, "-m", model, "--max-new-tokens", 2)


def test_it_starts_with_the_sdk_and_a_folder_only(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nowhere" in (wrong := pic("mcp", "nowhere")).err and wrong.code == 1
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    lacking = pic("mcp", docs)
    assert lacking.code == 1 and "pip install 'pictool[mcp]'" in lacking.err and lacking.err.count("\n") == 1


def test_what_is_not_read_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    from pictool.commands.linking.folder import FolderOptions
    from pictool.commands.mcp import FolderTools
    from pictool.documents.library import Library
    from pictool.documents.reading import Document

    class Reader:
        def read(self, _: Any) -> Library:
            problems, partial = (Document(Path("a"), problem="is binary"),), (Document(Path("b"), notes=("p. 2",)),)
            return Library((), lambda _: (), problems, partial)

    write("a", "x")
    tools = FolderTools(None, Reader(), FolderOptions(["a"]), None, 8)  # type: ignore[arg-type]
    tools._read(), tools._read()
    assert capsys.readouterr().err.splitlines() == ["pic: a: is binary", "pic: b: p. 2"]
