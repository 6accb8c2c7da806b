"""What `-o`, `--trace` and `--depfile` name: checked before a long run, written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.commands.config import FILE
from pictool.errors import InputError
from pictool.store.store import atomic_write

if TYPE_CHECKING:
    from pictool.runtime.model import Model

# What the answers of a model depend on, beside its weights.
_MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def output_path(option: str, name: str, inputs: Iterable[str | Path]) -> Path:
    """The path that an option names, checked before a long run: no directory, and no input."""
    path = Path(name)
    if path.is_dir():
        raise InputError(f"{option} {name}: is a directory; name a file")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise InputError(f"{option} {name}: {above.name} is no directory; name another")
    if path.exists() and any(Path(one).exists() and path.samefile(one) for one in inputs):
        raise InputError(f"{option} {name}: is an input as well; name another")
    return path


def depfile_path(target: Path) -> Path:
    """`x.kvo` → `x.d`, as of `cc -MD`."""
    return target.with_suffix(".d")


def write_depfile(target: Path, prerequisites: Sequence[Path]) -> None:
    """A Makefile fragment beside `target`, as of `cc -MD -MP`: what the target was made of, named as it was given."""
    settings = [Path(FILE)] if Path(FILE).exists() else []
    names = [_make_name(path) for path in dict.fromkeys([*prerequisites, *settings])]
    lines = [f"{_make_name(target)}: {' '.join(names)}", *(f"{name}:" for name in names)]
    with atomic_write(depfile_path(target)) as file:
        file.write(os.fsencode("\n".join(lines) + "\n"))


def model_files(model: Model) -> list[Path]:
    """The files that a model is made of."""
    from pictool.runtime.fingerprint import weight_files

    assert model.directory is not None
    named = [path for name in _MODEL_FILES if (path := model.directory / name).exists()]
    return named + weight_files(model.directory)


def _make_name(path: Path) -> str:
    """A path as a Makefile names it."""
    name = str(path)
    if re.search(r"[\\;=|\t\n]|\)$", name):
        raise InputError(f"{name!r}: no Makefile can name this file; rename it, or leave --depfile out")
    return re.sub(r"([ #:])", r"\\\1", name.replace("$", "$$"))
