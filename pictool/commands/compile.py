"""`pic compile`: files to objects."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.forecast import print_forecast, warn_of_disk
from pictool.commands.console.outputs import output_path, print_json
from pictool.commands.console.progress import new_work, progress
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.linking.request import STDIN, read_document, read_stdin
from pictool.commands.ray.compile import BulkOptions, run_bulk
from pictool.commands.settings.compiling import Compilation
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import (
    OUTPUT,
    SALT,
    EngineOption,
    JsonOption,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.compiler.recall import Surroundings
    from pictool.runtime.model import Model

app = make_app()
EMBEDDED = "embedded"
_RECORDS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


@command(app, "compile", "after", "codec", "model", "device", "dtype", "store", "remote", "signing_key", *SALT)
def run_compile(
    what: Compilation,
    settings: Settings,
    output: Annotated[
        Optional[str],
        option("-o, --output", "FILE", "Also write the object to this file (one input file only).", OUTPUT),
    ] = None,
    is_dry: Annotated[bool, option("--dry-run", None, "Print what compiling would cost, and write nothing.")] = False,
    as_json: JsonOption = False,
    engine: EngineOption = None,
    bulk: BulkOptions = BulkOptions(),
) -> None:
    """Compile documents to KV objects in advance. Unchanged input costs no model run.

    \b
      pic compile docs/*.txt
      pic compile docs --chunk-tokens 512 --overlap 64
      pic compile a.txt -o a.kvo
      pic compile --ray corpus/ more.jsonl --remote s3://bucket/pic
    """
    what.check()
    others = {
        "-o": output, "--engine": engine, "--dry-run": is_dry, "--splitter": what.splitter is not None,
        "--cut": what.cut is not None,
    }  # fmt: skip
    bulk.check(others, settings)
    if bulk.ray is not None:
        run_bulk(bulk, what, settings, as_json)
        return
    target = check_output(output, what.files)
    texts = read_texts(what.files, bulk)
    if is_dry:
        from pictool.compiler.forecast import forecast

        model = open_model(settings)
        chunks = [chunk for name, text in texts for chunk in what.chunks(model, text, name)]
        found = forecast(model, open_store(settings), chunks, what.options(model, settings))
        print_forecast(found, len(texts), as_json)
    elif target is None and (rows := recalled_rows(what, texts, settings, engine)):
        print_rows(settings.model or EMBEDDED, rows, as_json)
    else:
        model, compiled = compile_texts(what, texts, settings, engine)
        if target is not None:
            write_output(target, compiled)
        print_rows(model.name, [ReportRow.of(done) for done in compiled], as_json)


def read_texts(files: Sequence[str], bulk: BulkOptions = BulkOptions()) -> list[tuple[str, str]]:
    """Names and texts of files, of stdin (`-`), and of those below directories, in order.

    Below a directory, hidden files, links out of it, and files that cannot be read are skipped; a note names the latter
    two.

    Raises:
        InputError: a named file or a record that cannot be read, or a directory without texts.
    """
    texts = list[tuple[str, str]]()
    for name in files:
        texts += _records_of(name, bulk) if name.endswith(_RECORDS) else _texts_of(name)
    return texts


def _records_of(name: str, bulk: BulkOptions) -> list[tuple[str, str]]:
    """The texts of a file with a JSON object in each line, by FILE#NUMBER or id. Raises InputError."""
    from pictool.cluster.sources import Columns, SourceFile, read_documents

    source, texts = SourceFile(name, str(Path(name).absolute()), 0), list[tuple[str, str]]()
    for document in read_documents(source, Columns(bulk.text_column or "text", bulk.id_column)):
        if not document.text:
            problem = document.error or f"{document.id}: is empty; nothing to compile"
            raise InputError(problem if problem.startswith(name) else f"{name}: {problem}")
        texts.append((document.id, document.text))
    if not texts:
        raise InputError(f"{name}: has no lines; nothing to compile")
    return texts


def _texts_of(name: str) -> list[tuple[str, str]]:
    if name == STDIN:
        return [("stdin", read_stdin())]
    if Path(name).is_dir():
        return _texts_below(Path(name))
    return [(name, read_document(Path(name)))]


def _texts_below(directory: Path) -> list[tuple[str, str]]:
    from pictool.reading import is_within

    texts = []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts):
            if not is_within(path, directory):
                note(f"skipped: {path}: symbolic link to a place outside {directory}; name it explicitly to compile it")
                continue
            try:
                texts.append((str(path), read_document(path)))
            except InputError as error:
                note(f"skipped: {error}")
    if not texts:
        raise InputError(f"{directory}: contains no text files")
    return texts


def compile_texts(
    what: Compilation, texts: Sequence[tuple[str, str]], settings: Settings, engine: str | None
) -> tuple[Model, list[Compiled]]:
    """The model, and what was compiled."""
    from pictool.runtime.model import require_name

    surroundings = _surroundings(what, settings)  # before the model is loaded
    can_remember = surroundings is not None and surroundings.are_settled
    require_name(settings.model)
    engine_type, store = find_engine(engine, model=settings.model), open_store(settings)
    model = open_model(settings, engine_type.name)
    by_text = [what.chunks(model, text, name) for name, text in texts]
    chunks = [chunk for of_text in by_text for chunk in of_text]
    options = what.options(model, settings)
    warn_of_disk(model, store, chunks, options)
    with progress("compiling", len(chunks)) as advance, engine_type(model, store) as running:
        compiled = running.compile(
            chunks, options, force=what.force, on_done=lambda done: advance(*new_work(done))
        )  # fmt: skip
    rest = iter(compiled)
    by_name = [(name, text, [next(rest) for _ in of]) for (name, text), of in zip(texts, by_text, strict=True)]
    if not model.salt:
        from pictool.store.folders import add_compiled

        add_compiled(store.root, [(one.key, os.path.realpath(name)) for name, _, done in by_name for one in done])
    if surroundings is not None and can_remember:
        from pictool.compiler.recall import RecalledChunk, remember

        known = {}
        for name, text, done in by_name:
            known[text] = [RecalledChunk(one.chunk.source.removeprefix(name), len(one.chunk), one.key) for one in done]
        remember(surroundings, known)
    return model, compiled


def recalled_rows(
    what: Compilation, texts: Sequence[tuple[str, str]], settings: Settings, engine: str | None
) -> list[ReportRow] | None:
    """The rows of texts all of whose objects are known and whole in the store; None if model or tokenizer must say."""
    if what.force or engine is not None:
        return None
    surroundings = _surroundings(what, settings)
    if surroundings is None:
        return None
    from pictool.compiler.recall import recall

    known = recall(surroundings, [text for _, text in texts])
    if known is None:
        return None
    store, rows = open_store(settings), []
    for (name, _), chunks in zip(texts, known, strict=True):
        for one in chunks:
            if not store.has_whole(one.key):
                return None
            rows.append(ReportRow(one.key, f"{name}{one.suffix}", one.num_tokens, False, store.path(one.key)))
    return rows


def _surroundings(what: Compilation, settings: Settings) -> Surroundings | None:
    """What the keys follow from; None if the model must say."""
    from pictool.compiler.recall import Surroundings, model_files
    from pictool.core import CompileOptions
    from pictool.runtime.model import local_directory

    directory = local_directory(settings.model)
    if directory is None or what.splitter is not None:  # a splitter's package may change
        return None
    try:
        files = model_files(directory)
    except OSError:  # loading the model says so
        return None
    options = CompileOptions(settings.codec, cut=what.cut, after=settings.after)
    return Surroundings(
        directory, files, settings.device, settings.dtype, settings.salt, options, what.chunk_tokens, what.overlap
    )


def check_output(output: str | None, files: Sequence[str]) -> Path | None:
    """The target of -o, if it makes sense with the rest of the command line."""
    if output is None:
        return None
    if len(files) != 1:
        raise UsageError(f"-o {output}: works with a single file, but {len(files)} were given")
    if Path(output).suffix != ".kvo":
        raise UsageError(f"-o {output}: the name must end in .kvo, so that pic link recognises it")
    return output_path("-o", output, files)


def write_output(path: Path, compiled: Sequence[Compiled]) -> None:
    """Copy the objects of one file to `path`: one object, or a list with its members beside it."""
    from pictool.store.objects.bundles import ListMember, write_object_list

    if len(compiled) == 1:
        _copy(compiled[0].path, path)
        return
    members = [path.with_name(f"{path.stem}.{index:04d}.kvo") for index in range(len(compiled))]
    for chunk, member in zip(compiled, members, strict=True):
        _copy(chunk.path, member)
    write_object_list(
        path, [ListMember(member, each.chunk.continues) for member, each in zip(members, compiled, strict=True)]
    )


def _copy(source: Path, target: Path) -> None:
    from pictool.store.store import atomic_write

    with atomic_write(target) as out, source.open("rb") as file:
        shutil.copyfileobj(file, out, 1 << 20)


@dataclass(frozen=True)
class ReportRow:
    """One object of the report: its key, its text's source, and whether it is new."""

    key: str
    source: str
    tokens: int
    new: bool
    path: Path

    @classmethod
    def of(cls, done: Compiled) -> ReportRow:
        return cls(done.key, done.chunk.source, len(done.chunk), done.is_new, done.path)


def print_rows(model: str, rows: Sequence[ReportRow], as_json: bool) -> None:
    if as_json:
        print_json({"model": model, "objects": [asdict(row) | {"path": str(row.path)} for row in rows]})
    else:
        for row in rows:
            state = "new" if row.new else "cached"
            print(f"{row.key[:12]}  {row.tokens:6d} tokens  {state}  {visible(row.source)}")
    num_new = sum(row.new for row in rows)
    note(f"{count(len(rows), 'chunk')}, {num_new} compiled, {len(rows) - num_new} already in the store")
