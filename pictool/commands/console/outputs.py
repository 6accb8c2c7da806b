"""What commands write: notes, JSON, and the files that `-o`, `--trace` and `--depfile` name, whole or not at all."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.settings import find_file
from pictool.errors import InputError
from pictool.escapes import to_json

if TYPE_CHECKING:
    from pictool.runtime.model import Model

PICTURES = (".svg", ".png")
# What the answers of a model depend on, beside its weights.
_MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def print_json(data: Any) -> None:
    print(to_json(data))


def write_json(path: str | Path, data: Any) -> None:
    from pictool.store.store import atomic_write

    with atomic_write(Path(path)) as file:
        file.write(to_json(data).encode() + b"\n")


def output_path(option: str, name: str, inputs: Iterable[str | Path]) -> Path:
    """The path that an option names, checked before a long run: no directory, and no input.

    Raises:
        InputError: names the option and the path.
    """
    path = Path(name)
    if path.is_dir():
        raise InputError(f"{option} {name}: is a directory; name a file")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise InputError(f"{option} {name}: {above.name} is not a directory; name another")
    if path.exists() and any(Path(source).exists() and path.samefile(source) for source in inputs):
        raise InputError(f"{option} {name}: is also an input; name another")
    return path


def check_picture(name: str, inputs: Iterable[str | Path]) -> None:
    """Refuse a --plot that cannot be drawn, or written as SVG and PNG, before a long run.

    Raises:
        UsageError: another kind of file. InputError: matplotlib is missing; a path cannot be written, or is an input.
    """
    if Path(name).suffix not in PICTURES:
        raise UsageError(f"--plot {name}: must end in {' or '.join(PICTURES)}; both are written")
    require_matplotlib("--plot")
    for suffix in PICTURES:
        output_path("--plot", str(Path(name).with_suffix(suffix)), inputs)


def require_matplotlib(option: str) -> None:
    """Raise InputError, which names the option that needs it, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{option}: needs matplotlib; install pictool[plot], or leave {option} out")


def depfile_path(target: Path) -> Path:
    """`x.kvo` → `x.d`, as of `cc -MD`."""
    return target.with_suffix(".d")


def write_depfile(target: Path, prerequisites: Sequence[Path]) -> None:
    """Write a Makefile fragment beside `target`, as `cc -MD -MP`: what the target was made of, by the given names."""
    from pictool.store.store import atomic_write

    settings = find_file()
    read = [*prerequisites, *([] if settings is None else [settings])]
    names = [_make_name(path) for path in dict.fromkeys(read)]
    lines = [f"{_make_name(target)}: {' '.join(names)}", *(f"{name}:" for name in names)]
    with atomic_write(depfile_path(target)) as file:
        file.write(os.fsencode("\n".join(lines) + "\n"))


def model_files(model: Model) -> list[Path]:
    """The files that a model is made of."""
    from pictool.runtime.checkpoint import weight_files

    if model.directory is None:
        return list(model.files)
    named = [path for name in _MODEL_FILES if (path := model.directory / name).exists()]
    return named + weight_files(model.directory)


def _make_name(path: Path) -> str:
    """A path as a Makefile names it."""
    name = str(path)
    if re.search(r"[\\;=|\t\n]|\)$", name):
        raise InputError(f"{name!r}: a Makefile cannot name this file; rename it, or leave --depfile out")
    return re.sub(r"([ #:])", r"\\\1", name.replace("$", "$$"))
