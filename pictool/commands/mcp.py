"""`pic mcp`: folders of documents for agents, by the Model Context Protocol over stdin and stdout."""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from pictool import __version__
from pictool.commands.ask import PASSAGES, PassagesOption
from pictool.commands.console.verbosity import note
from pictool.commands.linking.folder import FolderOptions
from pictool.commands.linking.request import make_spec
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import SALT, AlgoOption, EngineOption, NewTokensOption, command, make_app
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError, PicError
from pictool.escapes import to_json, visible

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from pictool.documents.library import Library, LibraryReader
    from pictool.documents.reading import Document
    from pictool.engines.base import Engine
    from pictool.linker.spec import Spec

app = make_app()
T = TypeVar("T", bound="Callable[..., dict[str, Any]]")


@command(
    app, "mcp", "model", "device", "dtype", "after", "codec", "separator", "store", "remote", "require_signed", *SALT
)
def run_mcp(
    folder: FolderOptions,
    settings: Settings,
    num_passages: PassagesOption = PASSAGES,
    algo: AlgoOption = None,
    max_new_tokens: NewTokensOption = None,
    engine: EngineOption = None,
) -> None:
    """Let agents search and ask folders, over MCP.

    \b
      pic mcp docs
      claude mcp add docs -- pic mcp ~/docs --algo legolink-16
    """
    require_installed()
    os.read(0, 0), os.write(1, b"")  # closed streams raise here, not in a task of the server's
    spec = make_spec(settings, "?", algo, max_new_tokens)
    folder.find_files()  # a wrong name ends it now
    engine_type, store = find_engine(engine, model=settings.model), open_store(settings)
    model = open_model(settings, engine_type.name)
    with folder.open_reader(model, store) as reader, engine_type(model, store) as running:
        make_server(FolderTools(running, reader, folder, spec, num_passages)).run("stdio")
    store.drain()


def require_installed() -> None:
    """Raise InputError if the SDK is not installed, or an old one."""
    try:
        import mcp.server.mcpserver  # noqa: F401
    except ImportError as error:
        raise InputError("pic mcp needs mcp 2 or newer, which is not installed; pip install 'pictool[mcp]'") from error


@dataclass
class FolderTools:
    """What agents call; the docstrings of its tools are what they read. One call runs at a time.

    Files are read again once they have changed.
    """

    engine: Engine
    reader: LibraryReader
    options: FolderOptions
    spec: Spec
    num_passages: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    noted: set[Document] = field(default_factory=set)

    def search(
        self, words: Annotated[str, "What to look for: words of the passage, in any order."],
        most: Annotated[int, "How many passages to return at most."] = PASSAGES,
    ) -> dict[str, Any]:  # fmt: skip
        """Find the passages of the documents that have these words, the best first. Nothing is generated."""
        found = self._read().find(words, most, self.engine.model.max_positions)
        return {"passages": [one.report() | {"text": one.passage.text} for one in found]}

    def ask(self, question: Annotated[str, "The question, in a sentence."]) -> dict[str, Any]:
        """Answer a question from the passages that concern it, and name the sources."""
        from pictool.conversation import Conversation

        reply = Conversation(self.engine, self._read(), self.spec, self.num_passages).ask(question)
        return {"answer": reply.text, "sources": [found.passage.source for found in reply.sources]}

    def _read(self) -> Library:
        library = self.reader.read(self.options.find_files())
        for document in (*library.problems, *library.partial):
            if document not in self.noted:
                note(str(document))
        self.noted |= {*library.problems, *library.partial}
        return library


def make_server(tools: FolderTools) -> MCPServer:
    """The server of these tools."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    def guarded(tool: T) -> T:
        @functools.wraps(tool)
        def run(*args: Any, **named: Any) -> dict[str, Any]:
            try:
                with tools.lock:
                    shown: dict[str, Any] = json.loads(to_json(tool(*args, **named)))  # names that are not UTF-8, too
                    return shown
            except PicError as error:
                raise ToolError(visible(str(error))) from error

        run.__signature__ = _described(tool)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    server = MCPServer("pictool", version=__version__, log_level="WARNING")
    for tool in (tools.search, tools.ask):
        server.add_tool(guarded(tool))
    return server


def _described(tool: Callable[..., Any]) -> inspect.Signature:
    """A tool's signature, as pydantic reads it: the text in `Annotated[str, "…"]` describes a field."""
    from pydantic import Field

    hints, signature = get_type_hints(tool, include_extras=True), inspect.signature(tool)
    parameters = [
        parameter.replace(annotation=Annotated[hints[name].__origin__, Field(description=hints[name].__metadata__[0])])
        for name, parameter in signature.parameters.items()
    ]
    return signature.replace(parameters=parameters, return_annotation=hints["return"])
