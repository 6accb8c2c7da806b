"""Settings: what the command line, the environment and `pic.yaml` say together, read once per invocation of `pic`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pictool.commands.salt import with_salt
from pictool.commands.sizes import parse_size
from pictool.errors import InputError
from pictool.reading import read_file, shown

FILE = "pic.yaml"
_VARIABLES = {
    "model": "PIC_MODEL", "store": "PIC_STORE", "device": "PIC_DEVICE", "dtype": "PIC_DTYPE", "codec": "PIC_CODEC",
    "max_size": "PIC_MAX_SIZE", "salt": "PIC_SALT", "salt_file": "PIC_SALT_FILE", "remote": "PIC_REMOTE",
    "memory": "PIC_MEMORY", "remote_rate": "PIC_REMOTE_RATE",
}  # fmt: skip
_SIZES = ("max_size", "memory", "remote_rate")


@dataclass(frozen=True)
class Settings:
    """What a command works with and on. The command line comes before the environment, that before `pic.yaml`.

    Fields:
        model: directory or hub name; None: the embedded model.
        store: directory of objects; None: `.pic`.
        head, query_template: of prompts that name none.
        max_size: bytes that the store may hold; None: no limit.
        codec: how KV is kept.
        salt: separates tenants; each place may name a file that holds it (`salt_file`). Never shown.
        remote: URL of a store to fetch missing objects from; an empty text is none.
        memory: bytes of host memory that keep objects.
        remote_rate: bytes per second below which a transfer from the remote is given up; None: 8 KB.
        named: the settings that the command line says.
    """

    model: str | None = None
    store: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    head: str | None = None
    query_template: str | None = None
    max_size: int | None = None
    codec: str = "none"
    salt: str = field(default="", repr=False)
    remote: str | None = None
    memory: int = 0
    remote_rate: int | None = None
    named: frozenset[str] = frozenset()

    def override(self, **options: str | None) -> Settings:
        """These settings with options of the command line before them; None is an option that was not used."""
        used = {name: value for name, value in options.items() if value is not None}
        used = with_salt(used, "--salt", "--salt-file")
        return replace(self, **used, named=self.named | used.keys())  # type: ignore[arg-type]

    def option(self, name: str) -> str | None:
        """A setting as the command line says it; None if it does not."""
        return getattr(self, name) if name in self.named else None


def read_settings() -> Settings:
    """The settings of the environment and of `pic.yaml` in the working directory.

    Raises:
        InputError: a file that cannot be used, or a value that makes no sense.
    """
    path = Path(FILE)
    keys = (*(field.name for field in fields(Settings) if field.name != "named"), "salt_file")
    values: dict[str, Any] = read_yaml(path, keys) if os.path.lexists(path) else {}
    values = {name: text_or_none(path, name, value) for name, value in values.items()}
    values = with_salt(values, f"{path}: salt", "salt_file")
    named = {name: os.environ[key] for name, key in _VARIABLES.items() if os.environ.get(key)}
    values |= with_salt(named, _VARIABLES["salt"], _VARIABLES["salt_file"])
    values |= {name: parse_size(name, values[name]) for name in _SIZES if values.get(name) is not None}
    return Settings(**{name: value for name, value in values.items() if value is not None})


def read_yaml(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """A YAML mapping with no other keys than `keys`; an empty file is an empty one.

    Raises:
        InputError: unreadable, too large, not YAML, aliases, a key twice, not a mapping, or an unknown key.
    """
    import yaml

    from pictool.commands import strict_yaml

    try:
        data = strict_yaml.load(read_file(path, strict_yaml.MAX_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); it must be a YAML file") from error
    except Exception as error:  # YAMLError; PyYAML raises others too where a tag and a value do not go together
        is_known = isinstance(error, yaml.YAMLError | ValueError | RecursionError)
        problem = _yaml_problem(error) if is_known else type(error).__name__
        raise InputError(f"{path}: is not YAML that can be used ({problem}); correct it") from error
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be a mapping with the keys {', '.join(keys)}")
    if unknown := [shown_key(key) for key in data if key not in keys]:
        raise InputError(f"{path}: unknown key {', '.join(unknown)[:200]}; known are {', '.join(keys)}")
    return dict(data)


def _yaml_problem(error: Exception) -> str:
    """Where and what, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())[:200]
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"


def shown_key(key: Any) -> str:
    """A key of a YAML file, as a message shows it."""
    return key[:80] if isinstance(key, str) else shown(key)


def text_or_none(path: Path, key: str, value: Any) -> str | None:
    """A value of a YAML file that must be a text."""
    if value is not None and not isinstance(value, str):
        raise InputError(f"{path}: {key} must be a text; put it in quotes")
    if value is not None and ("\0" in value or any("\ud800" <= character <= "\udfff" for character in value)):
        raise InputError(f"{path}: {key} has a character that no text has (a zero byte, or half of a surrogate pair)")
    return value
