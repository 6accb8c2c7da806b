"""`pic ask`: folders of files and a question to an answer with its sources."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import note
from pictool.commands.link import Stream, compare_policies, fetching_ends, note_compiled, print_answer, print_verdict
from pictool.commands.linking.folder import FolderOptions, read_library
from pictool.commands.linking.request import AlgosOption, CompareOption, make_spec, named_policies, require_text
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import (
    SALT,
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
    from pictool.documents.library import Found
    from pictool.engines.base import Engine
    from pictool.linker.grid import LabelledPolicy

app = make_app()
PASSAGES = 8
PassagesOption = Annotated[int, option("--passages", "N", "Link at most N passages.", min=1)]


@dataclass(frozen=True)
class AskOptions:
    """How a question, or several, are asked."""

    question: Annotated[Optional[str], option("-q, --query", "TEXT", "The question.")] = None
    is_conversation: Annotated[
        bool,
        option(
            "-i, --interactive",
            None,
            "Read further questions from stdin, one per line. Chat models also see the earlier turns.",
        ),
    ] = False
    num_passages: PassagesOption = PASSAGES
    algos: AlgosOption = field(default_factory=list)
    compare: CompareOption = False
    max_new_tokens: NewTokensOption = None
    as_json: JsonOption = False
    engine: EngineOption = None


@command(
    app, "ask", "model", "device", "dtype", "after", "codec", "separator", "store", "remote", "require_signed", *SALT
)
def run_ask(options: AskOptions, folder: FolderOptions, settings: Settings) -> None:
    """Answer a question from a folder of documents, with sources.

    \b
      pic ask docs -q "Which festival does Gadwick hold?" --compare
      pic ask reports notes.md --include '*.pdf' -i
      pic ask docs -q "Who?" --algo auto --algo legolink-16
    """
    if options.question is None and not options.is_conversation:
        raise UsageError("no question; give one with --query, or ask several with -i")
    policies = named_policies(options.algos)
    if options.is_conversation and (options.as_json or len(policies) > 1):
        raise UsageError("-i: needs a single policy, and cannot be combined with --json")
    from pictool.conversation import Conversation

    policy = policies[0].policy if policies else None
    spec = make_spec(settings, options.question or "?", policy, options.max_new_tokens)
    engine_type, store = find_engine(options.engine, model=settings.model), open_store(settings)
    files = folder.find_files()
    model = open_model(settings, engine_type.name)
    kept = None if options.is_conversation else 0
    with (
        folder.open_reader(model, store) as reader,  # ends last: by then the store is there
        fetching_ends(store),
        engine_type(model, store, kept) as running,
    ):
        conversation = Conversation(running, read_library(reader, files), spec, options.num_passages)
        if options.question is not None and len(policies) > 1:
            ask_each(running, conversation, options, policies)
        elif options.question is not None:
            ask(conversation, options.question, options)
        if options.is_conversation:
            converse(conversation, options)


def ask(conversation: Conversation, question: str, options: AskOptions) -> None:
    """Answer a question; print the answer as it comes, then its sources, or all of it as JSON."""
    on_text = (lambda _: None) if options.as_json else Stream()
    reply = conversation.ask(
        require_text("the question", question), compare=options.compare, on_text=on_text, on_compile=note_compiled
    )
    if options.as_json:
        print_json(reply.report())
        return
    print(flush=True)  # the end of the streamed answer's line
    print_answer(reply.report())
    print_sources(reply.sources)


def ask_each(
    engine: Engine, conversation: Conversation, options: AskOptions, policies: Sequence[LabelledPolicy]
) -> None:
    """Answer a question from the same passages under several policies, each compared with full recompute."""
    spec, found = conversation.prepare(require_text("the question", options.question or ""))
    answers = compare_policies(engine, spec, policies)
    replies = [conversation.reply(answer, found) for answer in answers]
    if options.as_json:
        print_json([reply.report() for reply in replies])
        return
    print_verdict([labelled.label for labelled in policies], [answer.report() for answer in answers])
    print_sources(found)


def print_sources(sources: Sequence[Found]) -> None:
    """The passages' files and places, each once, the best first."""
    print("\nSources:", flush=True)
    for source in dict.fromkeys(found.passage.source for found in sources):
        print(f"  {visible(source)}")


def converse(conversation: Conversation, options: AskOptions) -> None:
    """Answer the lines of stdin until it ends; also after one that cannot be answered."""
    is_terminal = sys.stdin.isatty()
    while (question := read_line(is_terminal)) is not None:
        if question.strip():
            try:
                ask(conversation, question, options)
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
