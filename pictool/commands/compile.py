"""`pic compile`: text files to objects."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.common import UsageError, codec_setting, note, open_model, open_store, print_json
from pictool.commands.engine import find_engine
from pictool.commands.outputs import depfile_path, model_files, output_path, write_depfile
from pictool.commands.progress import progress
from pictool.compiler.compile import Compiled, chunks_of_files
from pictool.compiler.sensitivity import PROBES
from pictool.core import CompileOptions
from pictool.runtime.speculative import open_speculative
from pictool.store.bundles import write_object_list
from pictool.store.store import atomic_write

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def run_compile(
    files: Sequence[str], *, model: str | None, chunk_tokens: int | None, sinks: int, codec: str | None,
    probes: int | None, probe_model: str | None, output: str | None, depfile: bool, store: str | None,
    remote: str | None, salt: str | None, device: str | None, dtype: str | None, force: bool, engine: str,
    as_json: bool,
) -> None:  # fmt: skip
    target = check_output(output, depfile, files)
    if probes is None:
        probes = PROBES if probe_model else 0
    if probe_model and not probes:
        raise UsageError(f"--probe-model {probe_model}: measures nothing with --probes 0")
    opened, to = open_model(model, device, dtype, salt), open_store(store, remote)
    engine_type, options = find_engine(engine), CompileOptions(sinks, codec_setting(codec), probes)
    measurer = open_speculative(probe_model, opened) if probe_model else None
    chunks = chunks_of_files(opened, files, chunk_tokens)
    with progress("compiling", len(chunks)) as advance, engine_type(opened, to) as running:
        done = running.compile(
            chunks, options, force=force, probe_model=measurer, on_done=lambda _: advance()
        )  # fmt: skip
    if target is not None:
        if depfile:  # first, so that a target never stands without it
            write_depfile(target, [Path(files[0]), *model_files(opened), *(model_files(measurer) if measurer else ())])
        write_output(target, done)
    report(opened, done, as_json)


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
    if len(compiled) == 1:
        _copy(compiled[0].path, path)
        return
    members = [path.with_name(f"{path.stem}.{index:04d}.kvo") for index in range(len(compiled))]
    for one, member in zip(compiled, members, strict=True):
        _copy(one.path, member)
    write_object_list(path, [member.name for member in members])


def _copy(source: Path, target: Path) -> None:
    with atomic_write(target) as out, source.open("rb") as file:
        shutil.copyfileobj(file, out, 1 << 20)


def report(model: Model, compiled: Sequence[Compiled], as_json: bool) -> None:
    new = sum(one.is_new for one in compiled)
    if as_json:
        print_json({"model": model.name, "objects": [_row(one) for one in compiled]})
    else:
        for one in compiled:
            print(
                f"{one.key[:12]}  {len(one.chunk):6d} tokens  {'new' if one.is_new else 'cached'}  {one.chunk.source}"
            )
    note(f"{len(compiled)} chunks, {new} compiled, {len(compiled) - new} already in the store")


def _row(one: Compiled) -> dict[str, Any]:
    return {
        "key": one.key, "source": one.chunk.source, "tokens": len(one.chunk), "new": one.is_new, "path": str(one.path)
    }  # fmt: skip
