"""`pic inspect`: what an object's header says. Needs no model and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictool.commands.common import open_store, print_json
from pictool.store.format import ObjectFile


def run_inspect(name: str, *, store: str | None, show_text: bool, as_json: bool) -> None:
    path = Path(name)
    if not path.exists():
        keys = open_store(store)
        path = keys.path(keys.resolve(name))
    with ObjectFile(path) as file:
        described = describe(file)
        if show_text:
            described["text"] = file.text()
    if as_json:
        print_json(described)
    else:
        for field, value in described.items():
            print(f"{field:<13}{value}")


def describe(file: ObjectFile) -> dict[str, Any]:
    """The header of an object, field by field."""
    meta, target = file.meta, file.meta.target
    return {
        "path": str(file.path), "key": meta.key, "architecture": target.architecture, "model": target.model,
        "tokenizer": target.tokenizer, "tokens": meta.num_tokens, "layers": target.geometry.layers,
        "kv_heads": target.geometry.kv_heads, "head_dim": target.geometry.head_dim, "dtype": target.dtype,
        "sinks": meta.sinks, "codec": meta.codec, "bytes": file.num_bytes,
    }  # fmt: skip
