"""What several commands need: opening model and store, printing, dependency files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.config import setting
from pictool.store.store import Store, atomic_write

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def open_store(root: str | None) -> Store:
    return Store(setting("store", root, "PIC_STORE"))


def open_model(name: str | None, device: str | None, dtype: str | None) -> Model:
    quiet_libraries()
    from pictool.runtime.model import load_model

    return load_model(
        setting("model", name, "PIC_MODEL"),
        setting("device", device, "PIC_DEVICE") or "auto",
        setting("dtype", dtype, "PIC_DTYPE") or "auto",
    )


def quiet_libraries() -> None:
    """No progress bars or advice of the libraries underneath; their errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def note(text: str) -> None:
    """A line for the user on stderr."""
    print(f"pic: {text}", file=sys.stderr)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def write_depfile(target: Path, prerequisites: Sequence[Path]) -> None:
    """A Makefile fragment beside `target` (`x.kvo` → `x.d`), as of `cc -MD -MP`: what the target was made of."""
    names = [_make_name(relative(path)) for path in dict.fromkeys(prerequisites)]
    lines = [f"{_make_name(str(target))}: {' '.join(names)}", *(f"{name}:" for name in names)]
    with atomic_write(target.with_suffix(".d")) as file:
        file.write("\n".join(lines).encode() + b"\n")


def model_files(model: Model) -> list[Path]:
    """The files that a model's fingerprints are made of."""
    from pictool.runtime.fingerprint import weight_files

    assert model.directory is not None
    names = ("config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
    return [path for name in names if (path := model.directory / name).exists()] + weight_files(model.directory)


def relative(path: Path) -> str:
    """A path as a Makefile rule in the working directory would name it."""
    inside = os.path.relpath(path)
    return str(path.resolve()) if inside.startswith("..") else inside


def _make_name(name: str) -> str:
    return name.replace("$", "$$").replace(" ", "\\ ").replace("#", "\\#")
