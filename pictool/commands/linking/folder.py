"""Folders of documents that a command line names: their options, and reading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.forecast import warn_of_disk
from pictool.commands.console.progress import new_work, progress
from pictool.commands.console.verbosity import is_verbose, note
from pictool.commands.console.words import count
from pictool.commands.settings.options import COMPILING, OPTIONS, argument, option

if TYPE_CHECKING:
    from pictool.core import Chunk, CompileOptions
    from pictool.documents.library import Library, LibraryReader
    from pictool.documents.reading import Document
    from pictool.engines.base import Engine
    from pictool.runtime.model import Model
    from pictool.store.store import Store

MAX_NOTES = 50  # of files that cannot be read, one a line
PASSAGE_TOKENS = 256


@dataclass(frozen=True)
class FolderOptions:
    """What a command line says of the files that are read."""

    names: Annotated[list[str], argument("FOLDER", "Folders or files with documents.")]
    include: Annotated[
        list[str],
        option("--include", "GLOB", "Read only files that match a pattern, as in .gitignore; repeatable.", OPTIONS),
    ] = field(default_factory=list)
    exclude: Annotated[
        list[str], option("--exclude", "GLOB", "Skip files that match a pattern; repeatable.", OPTIONS)
    ] = field(default_factory=list)
    no_ignore: Annotated[
        bool,
        option(
            "--no-ignore", None, "Also read files that .gitignore excludes; hidden files and stores never.", OPTIONS
        ),
    ] = False
    reader: Annotated[
        Optional[str],
        option(
            "--reader",
            "CMD",
            ("Command that prints the text of other kinds of files, as 'pandoc -t plain {}'. Form feeds end pages."),
            OPTIONS,
        ),
    ] = None
    passage_tokens: Annotated[
        int,
        option(
            "--passage-tokens",
            "N",
            "Cut passages of at most N tokens (256); none joins two pages or sections.",
            COMPILING,
            min=16,
            show_default=False,
        ),
    ] = PASSAGE_TOKENS

    def find_files(self, names: Sequence[str | Path] | None = None) -> list[Path]:
        """The files of what the command line names, or of `names`."""
        from pictool.documents.finding import FileFilter, find_files

        chosen = FileFilter(tuple(self.include), tuple(self.exclude), self.no_ignore)
        return find_files(self.names if names is None else names, chosen)

    def open_reader(self, model: Model, store: Store) -> LibraryReader:
        from pictool.documents.library import LibraryReader

        return LibraryReader(model, self.passage_tokens, self.reader, store)


def read_library(reader: LibraryReader, files: Sequence[Path]) -> Library:
    """Read files; notes name those that cannot be read."""
    with progress("reading", len(files)) as advance:
        library = reader.read(files, on_read=lambda _: advance())
    note_problems(library.problems)
    passages = f"{count(len(library.passages), 'passage')} of {count(library.num_documents, 'document')}"
    note(f"{passages}, {sum(passage.num_tokens for passage in library.passages):,d} tokens")
    return library


def note_problems(problems: Sequence[Document]) -> None:
    """A note for each file that cannot be read, and their number."""
    shown = problems if is_verbose() else problems[:MAX_NOTES]
    for document in shown:
        note(f"left out: {document}")
    if len(problems) > len(shown):
        note(f"left out: {count(len(problems) - len(shown), 'more file')}; pic -v names all")
    if problems:
        note(f"{count(len(problems), 'file')} left out")


def compile_all_of(engine: Engine, chunks: Sequence[Chunk], options: CompileOptions) -> None:
    """Compile the chunks that the store lacks."""
    warn_of_disk(engine.model, engine.store, chunks, options)
    with progress("compiling", len(chunks)) as advance:
        engine.compile(chunks, options, on_done=lambda done: advance(*new_work(done)))
