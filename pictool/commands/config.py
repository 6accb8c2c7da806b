"""Defaults from `pic.yaml` in the working directory; the command line and the environment come before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pictool.errors import InputError

FILE = "pic.yaml"
_KEYS = ("model", "store", "device", "dtype", "head", "query_template")


def read_yaml(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """A YAML mapping with no other keys than `keys`.

    Raises:
        InputError: unreadable, not YAML, not a mapping, or an unknown key.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be a mapping with the keys {', '.join(keys)}")
    if unknown := [str(key) for key in data if key not in keys]:
        raise InputError(f"{path}: unknown key {', '.join(unknown)}; known are {', '.join(keys)}")
    return dict(data)


def setting(name: str, given: str | None, variable: str | None = None) -> str | None:
    """A setting: as given, else from the environment, else from `pic.yaml`."""
    if given is not None:
        return given
    if variable and os.environ.get(variable):
        return os.environ[variable]
    path = Path(FILE)
    value = read_yaml(path, _KEYS).get(name) if path.exists() else None
    return None if value is None else str(value)
