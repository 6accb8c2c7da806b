"""The files of folders: `.gitignore` files, hidden files, and patterns to include and exclude, as `rg` has them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.errors import InputError
from pictool.needs import require_extra
from pictool.reading import exists, is_within, read_file

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_FILES = 100_000
_MAX_IGNORE_BYTES = 1 << 20
_STORE_MARK = "pictool-store"
_IGNORE = ".gitignore"
_GONE = FileNotFoundError, NotADirectoryError


@dataclass(frozen=True)
class FileFilter:
    """Which files of a folder are read.

    Fields:
        include: patterns of `.gitignore`'s grammar, one of which a file must match; none: every file does.
        exclude: patterns of files that are left out.
        reads_ignored: whether `.gitignore` files do not count.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    reads_ignored: bool = False


def find_files(names: Sequence[str | Path], selection: FileFilter = FileFilter()) -> list[Path]:
    """The files that are named, and those below the folders that are, in the order of their paths; each once.

    Below a folder, hidden files, stores, links to folders or out of it, and what `selection` says are left out. Folders
    that cannot be listed are among the files: reading one says why.

    Raises:
        InputError: a name of nothing, no file at all, or too many; an invalid pattern.
    """
    found = dict[Path, None]()
    for name in map(Path, names):
        if not exists(name):
            raise InputError(f"{name}: no such file or folder")
        below = sorted(islice(_below(name, selection), MAX_FILES + 1)) if name.is_dir() else [name]
        found |= dict.fromkeys(below)
        if len(found) > MAX_FILES:
            raise InputError(
                f"{name}: more than {MAX_FILES:,d} files; choose a subfolder, or select files with --include"
            )
    if not found:
        raise InputError(f"{', '.join(map(str, names))}: has no files to read; hidden and ignored files are skipped")
    return list(found)


def _below(folder: Path, selection: FileFilter) -> Iterator[Path]:
    filtered, problems = _Filter(folder, selection), list[OSError]()
    for root, folders, names in os.walk(folder, onerror=problems.append):
        here = Path(root)
        if _STORE_MARK in names:
            folders.clear()
            continue
        filtered.enter(here, _IGNORE in names)
        folders[:] = sorted(name for name in folders if not filtered.leaves_out(here / name, is_folder=True))
        for path in (here / name for name in names):
            if filtered.includes(path) and _may_be_file(path) and is_within(path, folder):
                yield path
    yield from (Path(error.filename) for error in problems if not isinstance(error, _GONE))


def _may_be_file(path: Path) -> bool:
    """Whether a file is there, as far as that can be told: reading one that is withheld says why."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        return not isinstance(error, _GONE) and error.errno != errno.ELOOP


class _Filter:
    """Which files and folders below a folder are read."""

    def __init__(self, folder: Path, selection: FileFilter) -> None:
        self._folder, self._reads_ignored = folder, selection.reads_ignored
        self._include = _patterns("--include", selection.include) if selection.include else None
        self._exclude = _patterns("--exclude", selection.exclude)
        self._ignored: dict[Path, GitIgnoreSpec] = {}

    def enter(self, folder: Path, has_ignore_file: bool) -> None:
        """Read the `.gitignore` of a folder, before what is in it is asked for."""
        if has_ignore_file and not self._reads_ignored:
            self._ignored[folder] = _ignore_file(folder / _IGNORE)

    def includes(self, path: Path) -> bool:
        is_in = self._include is None or self._include.match_file(self._below(path))
        return is_in and not self.leaves_out(path)

    def leaves_out(self, path: Path, is_folder: bool = False) -> bool:
        if path.name.startswith(".") or self._exclude.match_file(self._below(path, is_folder)):
            return True
        for parent in path.parents:  # the nearest file that has a pattern for it decides
            if spec := self._ignored.get(parent):
                result = spec.check_file(path.relative_to(parent).as_posix() + "/" * is_folder)
                if result.include is not None:
                    return result.include
        return False

    def _below(self, path: Path, is_folder: bool = False) -> str:
        return path.relative_to(self._folder).as_posix() + "/" * is_folder


def _patterns(option: str, patterns: Sequence[str]) -> GitIgnoreSpec:
    require_extra("documents", "a folder of documents", "pathspec")
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(patterns)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from error


def _ignore_file(path: Path) -> GitIgnoreSpec:
    """The patterns of a `.gitignore`. As git has it, an unreadable file has none, and a wrong line is none."""
    from pathspec import GitIgnoreSpec

    try:
        lines = read_file(path, _MAX_IGNORE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        lines = []
    good = list[str]()
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        good.append(line)
    return GitIgnoreSpec.from_lines(good)
