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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pictool.errors import StoreError, UnwritableStoreError
from pictool.reading import NotRegularError, open_regular, read_file
from pictool.store.files import atomic_write, is_temp, make_directory, require_no_links
from pictool.store.scratch import SCRATCH

MARK = "pictool-store"
_FORMAT = b"pictool store "
_TEXT = _FORMAT + b"%d\nKV objects of pictool (pic), each named by its key. See docs/reference/store.md.\n"
_MAX_BYTES = 4096
_SHOWN = 3  # names of other files in a message
_DIGITS = re.compile(rb"[0-9]{20}")  # in the lock: the bytes of all objects
_SHARD, _OBJECT = re.compile("[0-9a-f]{2}"), re.compile(r"[0-9a-f]{64}\.kvo(?:\.sig)?")
_VOLUME = "lost+found"  # what a new file system has at its root
_OURS = {MARK, "objects", "tmp", _VOLUME}

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
                on_adopt(f"{root}: a store of an earlier version; now marked as a store by {MARK}")
        if (root / "objects").is_symlink() and (foreign := _foreign_objects(root)):
            raise _refusal(root, foreign)
    except OSError as error:
        raise UnwritableStoreError(f"{root}: cannot be created ({error.strerror}); nothing was changed") from error


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
        raise UnwritableStoreError(f"{path}: cannot be created ({error.strerror}); nothing was changed") from error
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
        raise StoreError(f"{root}: a store of version {theirs}, but this pic writes version 2; use a later pic")
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
    foreign = set(_foreign_objects(root))
    is_used = not foreign and _has_objects(root)
    foreign |= {name for name in _names(root) if name not in _OURS and not SCRATCH.fullmatch(name)}
    foreign |= {f"tmp/{name}" for name in _names(root / "tmp") if not is_temp(Path(name))}
    if is_marked(root):  # meanwhile: a store is marked before anything else is in it
        return False
    if foreign and not is_used:
        raise _refusal(root, sorted(foreign))
    return is_used


def _refusal(root: Path, foreign: list[str]) -> StoreError:
    more = f" and {len(foreign) - _SHOWN:,d} more" if len(foreign) > _SHOWN else ""
    return StoreError(
        f"{root}: is not a store, and contains other files ({', '.join(foreign[:_SHOWN])}{more}), so nothing was "
        "changed; choose an empty or new directory"
    )


def _names(path: Path) -> set[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return set(os.listdir(path))
    return set()


def _foreign_objects(root: Path) -> list[str]:
    """What in `objects` is neither a directory of objects nor, by its name, an object or its signatures."""
    foreign = []
    for shard in sorted(_names(root / "objects") - {_VOLUME}):
        path, place = root / "objects" / shard, f"objects/{shard}"
        is_ours = _SHARD.fullmatch(shard) and path.is_dir() and not path.is_symlink()
        names = sorted(name for name in _names(path) if not _OBJECT.fullmatch(name)) if is_ours else []
        foreign += [f"{place}/{name}" for name in names] if is_ours else [place]
    return foreign


def _has_objects(root: Path) -> bool:
    """Whether objects are, or were, in a directory, or in a store within it."""
    with suppress(OSError):
        if _DIGITS.fullmatch(read_file(root / "lock", 64)):
            return True
    if any(_names(root / "objects" / shard) for shard in _names(root / "objects")):
        return True
    inner = [root / place / name for place in ("eval", "replicas") for name in _names(root / place)]
    return any(_has_objects(path) for path in inner if path.is_dir() and not path.is_symlink())
