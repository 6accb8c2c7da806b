"""Defaults from `pic.yaml` in the working directory; the command line and the environment come before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pictool.errors import InputError

FILE = "pic.yaml"
_KEYS = (
    "model", "store", "device", "dtype", "head", "query_template", "max_size", "codec", "salt", "remote", "memory",
)  # fmt: skip


def read_yaml(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """A YAML mapping with no other keys than `keys`; an empty file is an empty one.

    Raises:
        InputError: unreadable, not YAML, not a mapping, or an unknown key.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an impossible date
        raise InputError(f"{path}: is not YAML ({_yaml_problem(error)})") from error
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be a mapping with the keys {', '.join(keys)}")
    if unknown := [str(key) for key in data if key not in keys]:
        raise InputError(f"{path}: unknown key {', '.join(unknown)}; known are {', '.join(keys)}")
    return dict(data)


def _yaml_problem(error: Exception) -> str:
    """Where and what, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"


def setting(name: str, given: str | None, variable: str | None = None) -> str | None:
    """A setting: as given, else from the environment, else from `pic.yaml`."""
    if given is not None:
        return given
    if variable and os.environ.get(variable):
        return os.environ[variable]
    path = Path(FILE)
    value = read_yaml(path, _KEYS).get(name) if path.exists() else None
    return text_or_none(path, name, value)


def text_or_none(path: Path, key: str, value: Any) -> str | None:
    """A value of a YAML file that must be a text."""
    if value is not None and not isinstance(value, str):
        raise InputError(f"{path}: {key} must be a text; put it in quotes")
    return value
