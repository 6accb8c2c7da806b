"""What makes a directory a store: a file that pic wrote into it. In any other directory with files nothing is changed.

    .pic/pictool-store      the mark: its first line is "pictool store 1", or 2 once it has had leases in its database

A directory that is missing or empty becomes a store when something is first written to it. So does one that an earlier
version wrote, which knew no mark: its `objects/` has nothing but objects. What holds somebody else's files is refused,
though a setting may name it: a `store` in the `pic.yaml` of a repository, a share as remote.

To read a store needs no mark.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from pictool.errors import StoreError, UnwritableStoreError
from pictool.reading import NotRegularError, open_regular, read_file
from pictool.store.entries import SUFFIX
from pictool.store.files import atomic_write, make_directory, require_no_links

MARK = "pictool-store"
_FORMAT = b"pictool store "
_TEXT = _FORMAT + b"%d\nKV objects of pictool (pic), each named by its key. See docs/reference/store.md.\n"
_MAX_BYTES = 4096
_SHOWN = 3  # names of other files in a message
_DIGITS = re.compile(rb"[0-9]{20}")  # in the lock: the bytes of all objects
# What a version without mark wrote, `check.json` apart: of another program a file may be called so, too.
_INNER = r"(?:eval/[0-9a-f]{8}|replicas/[^/]+)"  # stores within a store
_OBJECT = r"objects/[0-9a-f]{2}/[0-9a-f]{64}\.kvo(?:\.sig)?"
_NAMES = re.compile(
    rf"(?:{_INNER}/)?(?:objects(?:/[0-9a-f]{{2}})?|{_OBJECT}|tmp(?:/\.[^/]*\.[0-9a-f]{{16}}\.tmp)?|lock|pictool-store"
    r"|pins(?:/[0-9a-f]{64})?|stats(?:/[0-9]{2})?|(?:store|index|hits|sources|folders|readings|leases)\.sqlite3(?:-journal|-wal|-shm)?)"
    rf"|eval(?:/(?:results|questions)(?:/[0-9a-f]{{12}}\.jsonl?)?)?|replicas|{_INNER}"
    r"|files(?:/[^/]+(?:/file-[0-9a-f]{32})?)?|\.pic-scratch-[a-z0-9_]{8}(?:/.*)?",
    re.DOTALL,
)
_TABLES = {"objects", "leases", "counts", "hits", "sources", "folders", "readings"}  # of its databases
_VOLUME = "lost+found"  # what a new file system has at its root

_log = logging.getLogger("pictool.store")


def ensure_store(root: Path, outer: Path | None = None, on_adopt: Callable[[str], None] = _log.warning) -> None:
    """Ensure that a directory is a store; one that is missing, empty, or of an earlier version becomes one.

    Args:
        outer: the store that this one is in, if it is in one.
        on_adopt: is called with a message if it was one of an earlier version.

    Raises:
        StoreError: it has other files, or is a store of a later version; nothing was changed.
        UnwritableStoreError: it cannot be made or written.
    """
    outer = outer or root
    if outer != root:
        ensure_store(outer, None, on_adopt)
    try:
        require_no_links(root, outer)
        if not is_marked(root):
            is_earlier = _is_of_earlier_version(root)
            make_directory(root, outer)
            with atomic_write(root / MARK, root / "tmp") as file:
                file.write(_TEXT % 1)
            if is_earlier and outer == root:
                on_adopt(f"{root}: a store of an earlier version; {MARK} in it now says that it is one")
        if (root / "objects").is_symlink() and (foreign := _foreign(root, "objects")):
            raise _refusal(root, foreign)
    except OSError as error:
        raise UnwritableStoreError(f"{root}: cannot be made ({error.strerror}); nothing was changed") from error


def mark_leased(root: Path) -> None:
    """Let versions up to 0.3 refuse to write this store: they would remove the objects of leases that they do not see.

    Raises UnwritableStoreError.
    """
    if _version(root) != b"2":
        with atomic_write(root / MARK, root / "tmp") as file:
            file.write(_TEXT % 2)


def make_within(root: Path, *names: str) -> Path:
    """A directory within a store, for what is no object; it is made if it is missing. Raises as `ensure_store`."""
    ensure_store(root)
    path = root.joinpath(*names)
    try:
        make_directory(path, root)
    except OSError as error:
        raise UnwritableStoreError(f"{path}: cannot be made ({error.strerror}); nothing was changed") from error
    return path


def require_store(root: Path) -> None:
    """Raise StoreError for a directory that `ensure_store` would refuse for what is in it; nothing is written."""
    with suppress(OSError):
        if not is_marked(root):
            _is_of_earlier_version(root)


def is_store(root: Path) -> bool:
    """Whether this is a store, one of an earlier version too, so that `ensure_store` would take it."""
    try:
        return is_marked(root) or _is_of_earlier_version(root)
    except (OSError, StoreError):
        return False


def may_write(root: Path) -> bool:
    """Whether a directory is marked as a store. What is only counted or cached is written nowhere else."""
    try:
        return is_marked(root)
    except (OSError, StoreError):
        return False


def is_marked(root: Path) -> bool:
    """Whether a directory has our mark.

    Raises:
        StoreError: one of a later version.
        OSError: that cannot be told.
    """
    version = _version(root)
    if version not in (b"", b"1", b"2"):
        theirs = version.decode()[:20]
        raise StoreError(f"{root}: a store of version {theirs}, but this pic writes version 2; use a later one")
    return version != b""


def _version(root: Path) -> bytes:
    """The digits of a store's mark; b"": there is none."""
    try:
        with open(open_regular(root / MARK, os.O_NOFOLLOW), "rb") as file:
            text = file.read(_MAX_BYTES)
    except OSError as error:
        if not isinstance(error, NotRegularError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return b""
    version, _, _ = text.removeprefix(_FORMAT).partition(b"\n")
    return version if text.startswith(_FORMAT) and version.isdigit() else b""


def _is_of_earlier_version(root: Path) -> bool:
    """Whether a directory without a mark is a store of a version that wrote none; False if it is missing or empty.

    Raises:
        StoreError: it has other files.
        OSError: it cannot be read.
    """
    is_used = _has_objects(root) and not _foreign(root, "objects")
    foreign, names = [] if is_used else _foreign(root), _names(root)
    if is_marked(root):  # meanwhile: a store is marked before anything else is in it
        return False
    if foreign:
        raise _refusal(root, foreign)
    return is_used or bool(names - {MARK, "tmp", _VOLUME})


def _refusal(root: Path, foreign: list[str]) -> StoreError:
    more = f" and {len(foreign) - _SHOWN:,d} more" if len(foreign) > _SHOWN else ""
    return StoreError(
        f"{root}: is no store, and has other files ({', '.join(foreign[:_SHOWN])}{more}), so nothing was changed; "
        "name a directory that is empty, or not there yet"
    )


def _names(path: Path) -> set[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return set(os.listdir(path))
    return set()


def _foreign(root: Path, place: str = "") -> list[str]:
    """What in a directory, or in a `place` of it, no store has. Directories of other names are not listed."""
    foreign = []
    for name in sorted(_names(root / place)):
        path, relative = root / place / name, f"{place}/{name}".lstrip("/")
        if relative == _VOLUME or (name.endswith((SUFFIX, f"{SUFFIX}.sig")) and _NAMES.fullmatch(relative)):
            continue  # an object, its signatures, or what is damaged in their place
        is_linked = path.is_symlink() and relative != "objects"
        if not _NAMES.fullmatch(relative) or is_linked or not _may_be_ours(path):
            foreign.append(relative)
        elif path.is_dir():
            foreign += _foreign(root, relative)
    return foreign


def _may_be_ours(path: Path) -> bool:
    """Whether a file, if it is a database by its name, has our tables and no other, or none yet."""
    if path.suffix != ".sqlite3":
        return True
    with suppress(sqlite3.Error, OSError):
        os.close(open_regular(path, os.O_NOFOLLOW))
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            return tables <= _TABLES
    return False


def _has_objects(root: Path) -> bool:
    """Whether objects are, or were, in a directory, or in a store within it."""
    with suppress(OSError):
        if _DIGITS.fullmatch(read_file(root / "lock", 64)):
            return True
    if any(_names(root / "objects" / shard) for shard in _names(root / "objects")):
        return True
    inner = [root / place / name for place in ("eval", "replicas") for name in _names(root / place)]
    return any(_has_objects(path) for path in inner if path.is_dir() and not path.is_symlink())
