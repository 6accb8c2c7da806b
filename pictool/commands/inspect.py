"""`pic inspect`: what an object's header says. Needs no model and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictool.commands.common import open_store, print_json
from pictool.errors import InputError
from pictool.store.format import ObjectFile
from pictool.store.objectlist import is_object_list, read_object_list

BARS = "▁▂▃▄▅▆▇█"


def run_inspect(name: str, *, store: str | None, show_text: bool, as_json: bool) -> None:
    path = find(name, store)
    if is_object_list(path):
        described = {"path": str(path), "objects": [str(member) for member in read_object_list(path)]}
    else:
        described = describe(path, show_text)
    if as_json:
        print_json(described)
    else:
        for field, value in described.items():
            print(f"{field:<13}{value}")


def find(name: str, store: str | None) -> Path:
    """The file, or the object in the store that has this key."""
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix == ".kvo" or path.is_dir():
        raise InputError(f"{name}: no such object file")
    keys = open_store(store)
    return keys.path(keys.resolve(name))


def describe(path: Path, show_text: bool) -> dict[str, Any]:
    """The header of an object, field by field, and its text if asked."""
    with ObjectFile(path) as file:
        return _fields(file) | _table(file) | ({"text": file.text()} if show_text else {})


def _fields(file: ObjectFile) -> dict[str, Any]:
    meta, target = file.meta, file.meta.target
    return {
        "path": str(file.path), "key": meta.key, "architecture": target.architecture, "model": target.model,
        "tokenizer": target.tokenizer, "tokens": meta.num_tokens, "layers": target.geometry.layers,
        "kv_heads": target.geometry.kv_heads, "head_dim": target.geometry.head_dim, "dtype": target.dtype,
        "sinks": meta.sinks, "codec": meta.codec, "bytes": file.num_bytes, "fixups": meta.fixups or "none",
    }  # fmt: skip


def _table(file: ObjectFile) -> dict[str, str]:
    """The table of fixups, a bar per token, from nothing to the highest score; nothing without one."""
    table = file.fixups()
    if table is None:
        return {}
    scores = table.astype(float)
    levels = (scores / (scores.max() or 1.0) * (len(BARS) - 1)).round().astype(int)
    return {"highest": f"{scores.max():.3f}", "heat": "".join(BARS[level] for level in levels)}
