"""Writing one setting to `pic.yaml`: everything else of the file, its comments too, stays as it is."""

from __future__ import annotations

from pathlib import Path

import yaml

from pictool import strict_yaml
from pictool.commands.settings.settings import read_yaml, setting_keys
from pictool.errors import InputError
from pictool.reading import read_file


def write_setting(path: Path, name: str, value: str) -> None:
    """Set a text in a file of settings, which is made if there is none; nobody else sets one meanwhile.

    Raises:
        InputError: no file of settings, or one that has no place for a line of its own (`{model: x}`).
        StoreError: it cannot be written.
    """
    from pictool.store.files import atomic_write, locked_for_change

    with locked_for_change(path):
        changed = _changed(path, name, value)
        with atomic_write(path) as file:
            file.write(changed.encode())


def _changed(path: Path, name: str, value: str) -> str:
    """The file's text with a setting. Raises InputError."""
    text, before = "", {}
    if path.exists():
        before = read_yaml(path, setting_keys())
        text = read_file(path, strict_yaml.MAX_BYTES).decode("utf-8-sig")
    changed = _with(text, name, yaml.safe_dump(value).partition("\n")[0])
    try:
        is_right = strict_yaml.load(changed.encode()) == before | {name: value}
    except yaml.YAMLError:
        is_right = False
    if not is_right:
        raise InputError(f"{path}: {name} cannot be added automatically; add the line {name}: {value} yourself")
    return changed


def _with(text: str, name: str, value: str) -> str:
    """The text with the value of a key of its mapping replaced, or on a new last line."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(node, yaml.MappingNode):
        for key, old in node.value:
            if key.value == name:
                start, stop = old.start_mark.index, old.end_mark.index
                return f"{text[:start]}{' ' if start == stop else ''}{value}{text[stop:]}"
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{end}{name}: {value}\n"
