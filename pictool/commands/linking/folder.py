"""Folders of documents that a command line names: their options, and reading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.progress import progress
from pictool.commands.console.verbosity import is_verbose, note
from pictool.commands.console.words import count
from pictool.commands.settings.options import COMPILING, FILES, argument, option

if TYPE_CHECKING:
    from pictool.documents.library import Library, LibraryReader
    from pictool.documents.reading import Document
    from pictool.runtime.model import Model
    from pictool.store.store import Store

MAX_NOTES = 5  # of reasons why files cannot be read, or not wholly
PASSAGE_TOKENS = 256


@dataclass(frozen=True)
class FolderOptions:
    """What a command line says of the files that are read."""

    names: Annotated[list[str], argument("FOLDER", "Folders or files with documents.")]
    include: Annotated[
        list[str],
        option("--include", "GLOB", "Read only matching files; a pattern as in .gitignore. Repeatable.", FILES),
    ] = field(default_factory=list)
    exclude: Annotated[list[str], option("--exclude", "GLOB", "Skip matching files. Repeatable.", FILES)] = field(
        default_factory=list
    )
    no_ignore: Annotated[
        bool,
        option("--no-ignore", None, "Also read files that .gitignore excludes (never hidden files or stores).", FILES),
    ] = False
    reader: Annotated[
        Optional[str],
        option(
            "--reader",
            "CMD",
            "Command that prints the text of other file types, such as 'pandoc -t plain {}'; form feeds end pages.",
            FILES,
        ),
    ] = None
    passage_tokens: Annotated[
        int,
        option(
            "--passage-tokens",
            "N",
            "Cut passages of at most N tokens (256), never across pages or sections.",
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
    """Read files; notes name those that cannot be read, or of which only a part can."""
    with progress("reading", len(files)) as advance:
        library = reader.read(files, on_read=lambda _: advance())
    note_files("skipped", library.problems)
    note_files("partly read", library.partial)
    passages = f"{count(len(library.sizes), 'passage')} of {count(library.num_documents, 'document')}"
    note(f"{passages}, {sum(library.sizes):,d} tokens")
    return library


def note_files(what: str, files: Sequence[Document]) -> None:
    """A note for the first file of each reason, under `-v` for each file; and the number of files."""
    alike: dict[str, list[Document]] = {}
    for document in files:
        alike.setdefault(str(document.path) if is_verbose() else document.reason, []).append(document)
    shown = list(alike.values())[: None if is_verbose() else MAX_NOTES]
    for first, *others in shown:
        note(f"{what}: {first}" + (f" (and {count(len(others), 'more file')})" if others else ""))
    if num_left := len(files) - sum(map(len, shown)):
        note(f"{what}: {count(num_left, 'more file')} for other reasons; pic -v lists all")
    if files:
        note(f"{count(len(files), 'file')} {what}")
