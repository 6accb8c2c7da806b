"""`pic ask`: folders of files and a question to an answer with its sources."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import note
from pictool.commands.link import Stream, fetching_ends, note_compiled
from pictool.commands.linking.folder import FolderOptions, read_library
from pictool.commands.linking.request import make_spec, require_text
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import (
    SALT,
    AlgoOption,
    EngineOption,
    JsonOption,
    NewTokensOption,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import PicError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.conversation import Conversation

app = make_app()
PASSAGES = 8
PassagesOption = Annotated[int, option("--passages", "N", "Link at most N passages.", min=1)]


@command(app, "ask", "model", "device", "dtype", "codec", "separator", "store", "remote", "require_signed", *SALT)
def run_ask(
    folder: FolderOptions,
    settings: Settings,
    question: Annotated[Optional[str], option("-q, --query", "TEXT", "The question.")] = None,
    is_conversation: Annotated[
        bool,
        option(
            "-i, --interactive",
            None,
            "Read more questions from stdin, one a line. A chat model also gets the earlier turns.",
        ),
    ] = False,
    num_passages: PassagesOption = PASSAGES,
    algo: AlgoOption = None,
    max_new_tokens: NewTokensOption = None,
    as_json: JsonOption = False,
    engine: EngineOption = None,
) -> None:
    """Answer a question from a folder of documents, and name the sources.

    \b
      pic ask docs -q "Which festival does Gadwick hold?"
      pic ask reports notes.md --include '*.pdf' -i
    """
    if question is None and not is_conversation:
        raise UsageError("no question; give one with --query, or ask several with -i")
    if as_json and is_conversation:
        raise UsageError("--json: reports one question; leave -i out")
    from pictool.conversation import Conversation

    spec = make_spec(settings, question or "?", algo, max_new_tokens)
    engine_type, store = find_engine(engine, model=settings.model), open_store(settings)
    files = folder.find_files()
    model = open_model(settings)
    with folder.open_reader(model, store) as reader:
        library = read_library(reader, files)
    kept = None if is_conversation else 0
    with fetching_ends(store), engine_type(model, store, kept) as running:
        conversation = Conversation(running, library, spec, num_passages)
        if question is not None:
            ask(conversation, question, as_json)
        if is_conversation:
            converse(conversation)


def ask(conversation: Conversation, question: str, as_json: bool = False) -> None:
    """Answer a question; print the answer as it comes, then its sources, or all of it as JSON."""
    on_text = (lambda _: None) if as_json else Stream()
    reply = conversation.ask(require_text("the question", question), on_text=on_text, on_compile=note_compiled)
    if as_json:
        print_json(reply.report())
    else:
        print("\n\nSources:", flush=True)
        for source in dict.fromkeys(found.passage.source for found in reply.sources):
            print(f"  {visible(source)}")


def converse(conversation: Conversation) -> None:
    """Answer the lines of stdin until it ends; also after one that cannot be answered."""
    is_terminal = sys.stdin.isatty()
    while (question := read_line(is_terminal)) is not None:
        if question.strip():
            try:
                ask(conversation, question)
            except PicError as error:
                note(str(error))


def read_line(is_terminal: bool) -> str | None:
    """The next line of stdin, with a prompt and a history if it is a terminal; None at the end. Ctrl-C clears it."""
    if is_terminal:
        import readline  # noqa: F401 (`input` edits its line with it)
    try:
        return input("\n> " if is_terminal else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        return ""
