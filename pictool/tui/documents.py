"""The documents field of the link form: words as in a shell, with globs and `~`; and what each of them is."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

_GLOB = re.compile(r"[*?\[]")
_KEY = re.compile(r"[0-9a-f]{4,64}")


def split_documents(text: str) -> list[str]:
    """Return the documents that a line names, globs expanded in the order of their names.

    A word that is a file's name is that file, whatever it looks like; one that cannot be a path stays as it is.

    Raises:
        ValueError: an open quote, or a glob that no file matches.
    """
    return [document for word in shlex.split(text) for document in _expand(word)]


def _expand(word: str) -> list[str]:
    path = os.path.expanduser(word)  # noqa: PTH111 (what is no path stays as it is)
    if "\0" in path or os.path.lexists(path) or not _GLOB.search(path):
        return [path]
    found = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())  # noqa: PTH207 (as named)
    if not found:
        raise ValueError(f"{word}: no file matches")
    return found


def describe_documents(documents: Sequence[str], name_of: Callable[[str], str | None], num_lines: int) -> list[str]:
    """Return a line for each document that says what it is; at most `num_lines`, the last one counts the others.

    Args:
        name_of: the name of an object for people by its abbreviated key; None if there is no such object.
    """
    lines = [f"{number:>3}  {_describe(document, name_of)}" for number, document in enumerate(documents, 1)]
    if len(lines) <= num_lines:
        return lines
    return [*lines[: num_lines - 1], f"     and {len(lines) - num_lines + 1} more, {documents[-1]} the last"]


def _describe(document: str, name_of: Callable[[str], str | None]) -> str:
    if "\0" not in document and os.path.lexists(document):
        return document if Path(document).is_file() else f"{document}: is no file"
    name = name_of(document) if _KEY.fullmatch(document) else None
    return f"{document}: neither a file nor an object here" if name is None else f"{document}  {name}"
