"""What commands write: notes, JSON, and the files that `-o` and `--trace` name, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pictool.errors import InputError
from pictool.escapes import to_json


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
        raise InputError(f"{option} {name}: is a directory; specify a file")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise InputError(f"{option} {name}: {above.name} is not a directory; choose another path")
    if path.exists() and any(Path(source).exists() and path.samefile(source) for source in inputs):
        raise InputError(f"{option} {name}: is also an input; choose another file")
    return path
