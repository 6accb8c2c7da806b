"""The files in a store's directory: names, sizes and times of last use, without opening an object."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.store.files import is_temp

SUFFIX = ".kvo"
DEFAULT_ROOT = ".pic"
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


@dataclass(frozen=True)
class Entry:
    """One object's file. `used_ns` is when it was last used: its mtime, which every hit updates.

    A directory or another thing of this name, which is damage, has no bytes.
    """

    key: str
    directory: str
    num_bytes: int
    used_ns: int
    inode: int

    @property
    def path(self) -> Path:
        return Path(self.directory, self.key + SUFFIX)

    @classmethod
    def of(cls, path: Path) -> Entry | None:
        """The entry of an object's file; None if there is none (any more)."""
        return cls.within(str(path.parent), path.stem)

    @classmethod
    def within(cls, directory: str, key: str) -> Entry | None:
        """The same by directory and key: a store has many, and making a `Path` takes longer than the system call.

        Raises:
            OSError: whether it is there cannot be told, as a disk fails.
        """
        try:
            status = os.stat(f"{directory}/{key}{SUFFIX}")  # noqa: PTH116
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        return cls(key, directory, size, status.st_mtime_ns, status.st_ino)


def is_key(name: str) -> bool:
    """Whether this is a whole key, no abbreviation."""
    return re.fullmatch("[0-9a-f]{64}", name) is not None


def object_path(root: Path, key: str) -> Path:
    return root / "objects" / key[:2] / f"{key}{SUFFIX}"


def shards(root: Path) -> list[str]:
    """The directories of objects, each named by the two digits that its keys begin with; sorted. No link is one."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / "objects") as found:
        return sorted(entry.name for entry in found if len(entry.name) == 2 and not entry.is_symlink())
    return []


def keys_of(root: Path, shard: str) -> list[str]:
    """The keys of one shard, sorted; other files are left out."""
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(root / "objects" / shard)
        return sorted(name[: -len(SUFFIX)] for name in names if name.startswith(shard) and name.endswith(SUFFIX))
    return []


def entries_of(root: Path, shard: str) -> Iterator[Entry]:
    """The objects of one shard, sorted by key."""
    directory = str(root / "objects" / shard)
    for key in keys_of(root, shard):
        if entry := Entry.within(directory, key):
            yield entry


def entries(root: Path) -> Iterator[Entry]:
    """Every object of a store, sorted by key."""
    for shard in shards(root):
        yield from entries_of(root, shard)


def temp_candidates(root: Path) -> list[Path]:
    """Temp files: of live writers, and of those that were killed. What has another name than they have is not ours."""
    with suppress(FileNotFoundError, NotADirectoryError):
        temps = sorted(filter(is_temp, (root / "tmp").iterdir()))
        return [path for path in temps if path.is_symlink() or not path.is_dir()]
    return []


def inner_directories(root: Path, name: str) -> list[Path]:
    """The directories in this one, one or two levels below, that have a directory of this name; through no link.

    Such with `objects` are stores (`Store.within`), as evaluations and servers make them. Those in scratch directories
    are their processes' own.
    """
    paths = itertools.chain(root.glob(f"[!.]*/{name}"), root.glob(f"[!.]*/*/{name}"))
    found = (path.parent for path in paths if path.is_dir() and not path.is_symlink())
    return sorted(path for path in found if not any(each.is_symlink() for each in {path, path.parent} - {root}))
