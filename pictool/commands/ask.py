"""`pic ask`: folders of files and a question to an answer with its sources."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json
from pictool.commands.console.progress import progress
from pictool.commands.console.verbosity import is_verbose, note
from pictool.commands.console.words import count
from pictool.commands.link import Stream, fetching_ends_with_an_error, tell
from pictool.commands.linking.request import RequestOptions, make_spec, require_text
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import (
    COMPILING,
    OPTIONS,
    SALT,
    EngineOption,
    JsonOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import PicError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.conversation import Conversation, Reply
    from pictool.core import CompileOptions
    from pictool.documents.library import Found, Library
    from pictool.documents.reading import Document
    from pictool.engines.base import Engine
    from pictool.runtime.model import Model

app = make_app()
MAX_NOTES = 50  # of files that cannot be read, one a line
PASSAGES, PASSAGE_TOKENS = 8, 256
REQUEST_FIELDS_OF_LINK = ("documents", "query", "script", "chunk_tokens")


@dataclass(frozen=True)
class FolderOptions:
    """What a command line says of the files that are read."""

    names: Annotated[list[str], argument("FOLDER", "Folders, or files, of documents.")]
    include: Annotated[
        list[str], option("--include", "GLOB", "Read only files that match; as .gitignore has it; repeatable.", OPTIONS)
    ] = field(default_factory=list)
    exclude: Annotated[list[str], option("--exclude", "GLOB", "Leave out files that match; repeatable.", OPTIONS)] = (
        field(default_factory=list)
    )
    no_ignore: Annotated[bool, option("--no-ignore", None, "Read what .gitignore files leave out.", OPTIONS)] = False
    reader: Annotated[
        Optional[str], option("--reader", "CMD", "Reads files of other kinds, as 'pandoc -t plain {}'.", OPTIONS)
    ] = None
    passage_tokens: Annotated[
        int, option("--passage-tokens", "N", "Tokens of a passage at most.", COMPILING, min=16)
    ] = PASSAGE_TOKENS


@command(app, "ask", "model", "device", "dtype", "store", "remote", *SALT, without=REQUEST_FIELDS_OF_LINK)
def run_ask(
    folder: FolderOptions,
    request: RequestOptions,
    settings: Settings,
    question: Annotated[Optional[str], option("-q, --query", "TEXT", "The question.")] = None,
    is_conversation: Annotated[
        bool, option("-i, --interactive", None, "Ask more, one line each, in one process.")
    ] = False,
    num_passages: Annotated[int, option("--passages", "N", "Passages that are linked at most.", min=1)] = PASSAGES,
    compile_all: Annotated[bool, option("--all", None, "Compile all passages first, not only what is linked.")] = False,
    as_json: JsonOption = False,
    engine: EngineOption = None,
) -> None:
    """Answer a question from the documents of a folder, and name the sources.

    \b
      pic ask docs -q "Which festival does Gadwick hold?"
      pic ask reports notes.md --include '*.pdf' -i
    """
    if question is None and not is_conversation:
        raise UsageError("no question; give one with --query, or ask several with -i")
    if as_json and is_conversation:
        raise UsageError("--json: is of one question; leave -i out")
    from pictool.conversation import Conversation

    spec = make_spec(replace(request, query=question or "?"), settings)
    engine_type, store = find_engine(engine), open_store(settings)
    model = open_model(settings)
    library = read_library(model, folder)
    with engine_type(model, store) as running, fetching_ends_with_an_error(store):
        if compile_all:
            compile_library(running, library, spec.objects)
        conversation = Conversation(running, library, spec, num_passages)
        if question is not None:
            reply = ask(conversation, question, as_json)
            if as_json:
                print_json(reply.report())
        if is_conversation:
            converse(conversation)
    store.drain()


def read_library(model: Model, folder: FolderOptions) -> Library:
    """What the command line names, read; notes say what cannot be."""
    from pictool.documents.finding import Selection, find_files
    from pictool.documents.library import Library

    files = find_files(folder.names, Selection(tuple(folder.include), tuple(folder.exclude), folder.no_ignore))
    with progress("reading", len(files)) as advance:
        library = Library.read(model, files, folder.passage_tokens, folder.reader, on_read=lambda _: advance())
    tell_problems(library.problems)
    passages = f"{count(len(library.passages), 'passage')} of {count(library.num_documents, 'document')}"
    note(f"{passages}, {sum(passage.num_tokens for passage in library.passages):,d} tokens")
    return library


def tell_problems(problems: Sequence[Document]) -> None:
    """A note for each file that cannot be read, and their number."""
    shown = problems if is_verbose() else problems[:MAX_NOTES]
    for document in shown:
        note(f"left out: {document}")
    if len(problems) > len(shown):
        note(f"left out: {count(len(problems) - len(shown), 'more file')}; pic -v names all")
    if problems:
        note(f"{count(len(problems), 'file')} left out")


def compile_library(engine: Engine, library: Library, options: CompileOptions) -> None:
    """Compile all passages that the store lacks."""
    with progress("compiling", len(library.passages)) as advance:
        engine.compile(
            [passage.chunk(engine.model) for passage in library.passages], options,
            on_done=lambda done: advance(len(done.chunk) if done.is_new else 0),
        )  # fmt: skip


def ask(conversation: Conversation, question: str, is_quiet: bool = False) -> Reply:
    """Answer a question; print the answer as it comes, then its sources, unless the caller prints the reply."""
    stream = None if is_quiet else Stream()
    reply = conversation.ask(require_text("the question", question), on_text=stream, on_compile=tell)
    if not is_quiet:
        print(flush=True)
        print_sources(reply.sources)
    return reply


def print_sources(sources: Sequence[Found]) -> None:
    print("\nSources:")
    for source in dict.fromkeys(found.passage.source for found in sources):
        print(f"  {visible(source)}")


def converse(conversation: Conversation) -> None:
    """Answer the lines of stdin until it ends; one that cannot be answered is not the end."""
    while (question := read_line()) is not None:
        if not question.strip():
            continue
        try:
            ask(conversation, question)
        except PicError as error:
            note(str(error))


def read_line() -> str | None:
    """The next line of stdin, with a prompt and a history where it is a terminal; None at the end."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 (`input` edits its line with it)
    try:
        return input("\n> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
