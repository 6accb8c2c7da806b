"""`pic compile`: text files to objects."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.engine import find_engine
from pictool.commands.errors import UsageError
from pictool.commands.options import (
    COMPILING,
    OUTPUT,
    SALT,
    ChunkOption,
    DepfileOption,
    EngineOption,
    JsonOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.outputs import depfile_path, model_files, note, output_path, print_json, write_depfile
from pictool.commands.progress import progress
from pictool.commands.resources import open_model, open_store
from pictool.commands.settings import Settings
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.runtime.model import Model

app = make_app()


@command(app, "compile", "codec", "model", "device", "dtype", "store", "remote", *SALT)
def run_compile(
    settings: Settings,
    files: Annotated[list[str], argument("FILE", "UTF-8 text files.")],
    force: Annotated[bool, option("--force", None, "Compute again what is already there.")] = False,
    chunk_tokens: ChunkOption = None,
    sinks: Annotated[
        int, option("--sinks", "N", "Dummy tokens before each chunk, dropped afterwards.", COMPILING, min=0)
    ] = 0,
    probes: Annotated[
        Optional[int],
        option("--probes", "N", "Measure a table of fixups, after N prefixes; costly.", COMPILING, min=0),
    ] = None,
    probe_model: Annotated[
        Optional[str], option("--probe-model", "NAME", "The small model that measures it; 8 probes.", COMPILING)
    ] = None,
    output: Annotated[
        Optional[str], option("-o, --output", "FILE", "Write one file's object here too.", OUTPUT)
    ] = None,
    depfile: DepfileOption = False,
    as_json: JsonOption = False,
    engine: EngineOption = None,
) -> None:
    """Compile text files to KV objects. Unchanged input costs no model run.

    \b
      pic compile docs/*.txt
      pic compile a.txt -o a.kvo --depfile
    """
    target = check_output(output, depfile, files)
    if probe_model and probes == 0:
        raise UsageError(f"--probe-model {probe_model}: measures nothing with --probes 0")
    from pictool.compiler.compile import chunks_of_files
    from pictool.compiler.sensitivity import PROBES
    from pictool.core import CompileOptions
    from pictool.runtime.speculative import open_speculative

    if probes is None:
        probes = PROBES if probe_model else 0
    model, store, engine_type = open_model(settings), open_store(settings), find_engine(engine)
    measurer = open_speculative(probe_model, model) if probe_model else None
    chunks = chunks_of_files(model, files, chunk_tokens)
    with progress("compiling", len(chunks)) as advance, engine_type(model, store) as running:
        compiled = running.compile(
            chunks, CompileOptions(sinks, settings.codec, probes), force=force, probe_model=measurer,
            on_done=lambda _: advance(),
        )  # fmt: skip
    if target is not None:
        if depfile:  # first, so that a target is never there without it
            write_depfile(target, [Path(files[0]), *model_files(model), *(model_files(measurer) if measurer else ())])
        write_output(target, compiled)
    print_compiled(model, compiled, as_json)


def check_output(output: str | None, depfile: bool, files: Sequence[str]) -> Path | None:
    """The target of -o, if it makes sense with the rest of the command line."""
    if output is None:
        if depfile:
            raise UsageError("--depfile: needs -o, whose prerequisites it tells")
        return None
    if len(files) != 1:
        raise UsageError(f"-o {output}: takes the objects of one file, but {len(files)} were given")
    if Path(output).suffix != ".kvo":
        raise UsageError(f"-o {output}: an object's name ends in .kvo, by which pic link knows it")
    if depfile:
        output_path("--depfile", str(depfile_path(Path(output))), files)
    return output_path("-o", output, files)


def write_output(path: Path, compiled: Sequence[Compiled]) -> None:
    """Copy the objects of one file to `path`: one object, or a list with its members beside it."""
    from pictool.store.bundles import write_object_list

    if len(compiled) == 1:
        _copy(compiled[0].path, path)
        return
    members = [path.with_name(f"{path.stem}.{index:04d}.kvo") for index in range(len(compiled))]
    for chunk, member in zip(compiled, members, strict=True):
        _copy(chunk.path, member)
    write_object_list(path, [member.name for member in members])


def _copy(source: Path, target: Path) -> None:
    from pictool.store.store import atomic_write

    with atomic_write(target) as out, source.open("rb") as file:
        shutil.copyfileobj(file, out, 1 << 20)


def print_compiled(model: Model, compiled: Sequence[Compiled], as_json: bool) -> None:
    if as_json:
        print_json({"model": model.name, "objects": [_row(done) for done in compiled]})
    else:
        for done in compiled:
            state = "new" if done.is_new else "cached"
            print(f"{done.key[:12]}  {len(done.chunk):6d} tokens  {state}  {visible(done.chunk.source)}")
    num_new = sum(done.is_new for done in compiled)
    note(f"{len(compiled)} chunks, {num_new} compiled, {len(compiled) - num_new} already in the store")


def _row(done: Compiled) -> dict[str, Any]:
    return {
        "key": done.key, "source": done.chunk.source, "tokens": len(done.chunk), "new": done.is_new,
        "path": str(done.path),
    }  # fmt: skip
