"""Keeping a store in step with a folder: what is new is compiled, the objects of what is gone are removed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.compiler.compile import object_key
from pictool.core import Chunk, CompileOptions
from pictool.documents.library import Library
from pictool.errors import InputError
from pictool.store.eviction import Tally, kept
from pictool.store.side.folders import read_folders, set_folder
from pictool.store.store import Store
from pictool.store.upkeep import expire

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class SyncPlan:
    """What a sync would change.

    Fields:
        chunks: by key, all that the folder has now; `new` are the keys that the store lacks.
        gone: keys of objects that the folder had at the last sync and has no more. Pinned and leased ones, and those of
            other folders, are none of them; nor are those of a file that cannot be read now.
    """

    folder: str
    target: str
    chunks: dict[str, Chunk]
    key_to_path: dict[str, str]
    new: tuple[str, ...]
    gone: dict[str, str]  # key → path

    def report(self) -> dict[str, Any]:
        return {
            "folder": self.folder, "objects": len(self.chunks),
            "new": [{"key": key, "source": self.chunks[key].source} for key in self.new],
            "gone": [{"key": key, "path": path} for key, path in self.gone.items()],
        }  # fmt: skip


def plan_sync(model: Model, store: Store, folder: Path, library: Library, options: CompileOptions) -> SyncPlan:
    """Compare a folder's library with the store. Writes nothing.

    Raises:
        InputError: a model with a salt. StoreError: the store's record of folders cannot be read.
    """
    if model.salt:
        raise InputError("pic sync keeps names of files beside their objects, so it takes no salt; leave --salt out")
    name, target = str(folder.resolve()), _target(model, options)
    chunks, key_to_path = dict[str, Chunk](), dict[str, str]()
    for passage in library.passages:
        chunk = passage.chunk(model)
        key = object_key(model, chunk, options)
        chunks[key], key_to_path[key] = chunk, passage.path
    unread = {str(document.path) for document in library.problems}
    known, gone = read_folders(store.root), dict[str, str]()
    others = {row.key for row in known if (row.folder, row.target) != (name, target)} | kept(store.root)
    for row in known:
        if (row.folder, row.target) == (name, target) and row.key not in chunks:
            if row.path in unread:
                key_to_path[row.key] = row.path
            elif row.key not in others and store.path(row.key).exists():
                gone[row.key] = row.path
    new = tuple(key for key in chunks if not store.has(key))
    return SyncPlan(name, target, chunks, key_to_path, new, gone)


def finish_sync(store: Store, plan: SyncPlan) -> Tally:
    """Once what is new is compiled: record what the folder has, and remove what is gone. Raises StoreError."""
    set_folder(store.root, plan.folder, plan.target, plan.key_to_path)
    return expire(store, list(plan.gone)) if plan.gone else Tally()


def _target(model: Model, options: CompileOptions) -> str:
    """Names the model and how it compiles; another one's objects of the same folder stay."""
    named = json.dumps([asdict(model.target), asdict(options)], sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()


def require_folders(names: Sequence[str]) -> list[Path]:
    """Raises InputError: one is no folder."""
    for name in names:
        if not Path(name).is_dir():
            raise InputError(f"{name}: is not a folder; pic sync takes folders")
    return list(map(Path, names))
