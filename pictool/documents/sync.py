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
from pictool.store.folders import read_compiled, read_folders, set_folder
from pictool.store.store import Store
from pictool.store.upkeep import expire

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class SyncPlan:
    """What a sync would change.

    Fields:
        named: the folder as it was named, with which paths begin here; `folder` is its real path.
        chunks: by key, all that the folder has now; `new` are the keys that the store lacks.
        gone: keys of objects that the folder had at the last sync and has no more: their file is known to be gone or
            changed. Pinned and leased ones, those of other folders, and what `pic compile` made of a file elsewhere are
            none of them.
        unchanged: the record of what the folder had of files that cannot be read now: key → path.
        withheld: files and folders that the system does not let be read.
    """

    named: str
    folder: str
    target: str
    chunks: dict[str, Chunk]
    key_to_path: dict[str, str]
    new: tuple[str, ...]
    gone: dict[str, str]  # key → path
    unchanged: dict[str, str]
    withheld: tuple[str, ...]

    def report(self) -> dict[str, Any]:
        return {
            "folder": self.folder, "objects": len(self.chunks),
            "new": [{"key": key, "source": self.chunks[key].source} for key in self.new],
            "gone": [{"key": key, "path": path} for key, path in self.gone.items()], "withheld": list(self.withheld),
        }  # fmt: skip


def plan_sync(model: Model, store: Store, folder: Path, library: Library, options: CompileOptions) -> SyncPlan:
    """Compare a folder's library with the store. Writes nothing.

    Raises:
        InputError: a model with a salt. StoreError: the store's record of folders cannot be read.
    """
    if model.salt:
        raise InputError("--salt: pic sync records file names with their objects, so it cannot use a salt; omit it")
    real, target = folder.resolve(), _target(model, options)
    chunks, key_to_path = dict[str, Chunk](), dict[str, str]()
    for passage in library.passages:
        chunk = passage.chunk(model)
        key = object_key(model, chunk, options)
        chunks[key], key_to_path[key] = chunk, passage.path
    unread = {document.path.relative_to(folder) for document in library.problems}
    withheld = {str(document.path) for document in library.problems if document.is_withheld}
    unchanged, gone, others = dict[str, str](), dict[str, str](), _kept_by_others(store, real, target)
    for row in read_folders(store.root):
        if (row.folder, row.target) != (str(real), target) or row.key in chunks:
            continue
        places = _places(row.path, real)
        named = str(folder / places[0]) if Path(row.path).is_relative_to(real) else row.path
        if any(not unread.isdisjoint((place, *place.parents)) for place in places):
            unchanged[row.key] = row.path
        elif any(_is_withheld(real / place) for place in places):
            withheld.add(named)
            unchanged[row.key] = row.path
        elif row.key not in others and store.path(row.key).exists():
            gone[row.key] = named
    new = tuple(key for key in chunks if not store.has(key))
    return SyncPlan(str(folder), str(real), target, chunks, key_to_path, new, gone, unchanged, tuple(sorted(withheld)))


def _kept_by_others(store: Store, folder: Path, target: str) -> set[str]:
    """The keys of objects that stay, whatever a folder has: pinned, leased, of other folders, of files elsewhere."""
    rows = read_folders(store.root)
    others = {row.key for row in rows if (row.folder, row.target) != (str(folder), target)}
    compiled = {key for key, file in read_compiled(store.root) if not Path(file).is_relative_to(folder)}
    return others | compiled | set(kept(store.root))


def _places(path: str, folder: Path) -> list[Path]:
    """Where in a folder a file that was kept may be, below it.

    Earlier versions kept its path as the folder was named (`notes`, `.`, `../notes`, a link to it), from a directory
    that is not known: then it is the path's end, of one of several lengths, the longest of them first.
    """
    found = Path(path)
    if found.is_relative_to(folder):
        return [found.relative_to(folder)]
    parts = [part for part in found.parts if part not in ("/", "..")]
    return [Path(*parts[start:]) for start in range(len(parts))]


def _is_withheld(path: Path) -> bool:
    """Whether the system does not tell if a file is there."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return False


def finish_sync(store: Store, plan: SyncPlan) -> Tally:
    """Once what is new is compiled: record what the folder has, and remove what is gone. Raises StoreError."""
    paths = {key: str(plan.folder / Path(path).relative_to(plan.named)) for key, path in plan.key_to_path.items()}
    set_folder(store.root, plan.folder, plan.target, plan.unchanged | paths)
    return expire(store, list(plan.gone)) if plan.gone else Tally()


def _target(model: Model, options: CompileOptions) -> str:
    """Names the model and how it compiles; another one's objects of the same folder stay."""
    named = json.dumps([asdict(model.target), asdict(options)], sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()


def require_all_read(plans: Sequence[SyncPlan]) -> None:
    """Raises InputError: something in a folder could not be read, whose objects stayed."""
    if withheld := [name for plan in plans for name in plan.withheld]:
        more = f" and {len(withheld) - _SHOWN:,d} more" if len(withheld) > _SHOWN else ""
        raise InputError(
            f"{', '.join(withheld[:_SHOWN])}{more}: cannot be read, so its earlier objects are kept; check "
            "permissions, and sync again"
        )


def require_folders(names: Sequence[str]) -> list[Path]:
    """Raises InputError: one is no folder."""
    for name in names:
        if not Path(name).is_dir():
            raise InputError(f"{name}: is not a folder; pic sync takes folders")
    return list(map(Path, names))
