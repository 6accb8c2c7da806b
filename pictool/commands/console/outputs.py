"""What commands write: notes, JSON, and the files that `-o` and `--trace` name, whole or not at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.console.errors import UsageError
from pictool.errors import InputError
from pictool.escapes import to_json

if TYPE_CHECKING:
    pass

PICTURES = (".svg", ".png")


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
