"""Whether a run that failed, or was killed, lost or broke anything: what is below a directory afterwards."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from old_stores import COUNTS, A

from pictool.errors import PicError
from pictool.store.leases import leased_keys
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from pictool.store.upkeep import gc, verify
from pictool.store.usage import read_counts

STORES = ("st", "new", "far", "chained", "damaged", "old")
_CACHES = re.compile(
    r"(^|/)(store\.sqlite3(-journal)?|lock)$|^cache(/[a-z]+)*(/([0-9a-z-]+\.json|compiled\.sqlite3))?$"
)
_OBJECT = re.compile(r"[a-z]+(/eval/[^/]+|/prefixes)?/objects/[0-9a-f]{2}/[0-9a-f]{64}\.kvo")


@dataclass(frozen=True)
class State:
    """The files below a directory: name → hash of the content; and its directories, but those of objects."""

    files: dict[str, bytes]
    directories: frozenset[str]

    @classmethod
    def of(cls, root: Path) -> State:
        files, directories = dict[str, bytes](), set[str]()
        for directory, inner, names in os.walk(root):
            place = os.path.relpath(directory, root)
            files |= {
                os.path.normpath(f"{place}/{name}"): blake2b(Path(directory, name).read_bytes()).digest()
                for name in names
            }
            directories |= {os.path.normpath(f"{place}/{name}") for name in inner}
        return cls(files, frozenset(name for name in directories if not re.search(r"objects(/|$)|/tmp$", name)))

    @cached_property
    def objects(self) -> dict[str, bytes]:
        return {name: content for name, content in self.files.items() if _OBJECT.fullmatch(name)}

    def litter(self, *expected: State) -> list[str]:
        """What is here and in none of these states: neither an object, nor a cache."""
        known = set().union(*(state.files.keys() | state.directories for state in expected))
        here = [name for name in self.files if not _OBJECT.fullmatch(name)] + list(self.directories)
        return sorted(name for name in here if name not in known and not _CACHES.search(name) and not _is_plain(name))


def _is_plain(name: str) -> bool:
    """A directory that every store has."""
    return name in STORES or (name.split("/")[-1] in ("pins", "learned") and name.split("/")[0] in STORES)


class Known:
    """What is right: the contents that an object may have, and one of them to compare numbers with."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._contents: dict[str, set[bytes]] = {}
        directory.mkdir()

    def learn(self, root: Path, state: State, excused: Iterable[str] = ()) -> None:
        for name, content in state.objects.items():
            if name not in excused:
                self._contents.setdefault(Path(name).stem, set()).add(content)
                shutil.copyfile(root / name, self._directory / Path(name).name)

    def is_right(self, root: Path, name: str, content: bytes) -> bool:
        """Whether an object is one of those that runs without faults made, but for the last bits of its numbers.

        These depend on what is computed together, which is another set after a fault.
        """
        if content in self._contents.get(Path(name).stem, ()):
            return True
        right = self._directory / Path(name).name
        return right.exists() and is_same(root / name, right)


def is_same(path: Path, right: Path) -> bool:
    """Whether two object files, or lists of them, say the same, but for the last bits of numbers."""
    if path.read_bytes() == right.read_bytes():
        return True
    try:
        with ObjectFile(path) as one, ObjectFile(right) as other:
            one.verify()
            layers = range(one.meta.target.geometry.layers)
            return (
                one.meta == other.meta
                and one.text() == other.text()
                and all(np.allclose(_numbers(one, index), _numbers(other, index), atol=1e-4) for index in layers)
            )
    except PicError:
        return False


def _numbers(file: ObjectFile, layer: int) -> Any:
    return np.frombuffer(b"".join(bytes(part) for part in file.layer(layer)), np.float32)


def collect(root: Path) -> list[str]:
    """Run a gc in every store; what fails."""
    problems = []
    for name in STORES:
        if (root / name).is_dir():
            try:
                gc(Store(root / name))
            except PicError as error:
                problems.append(f"gc of {name}: {error}")
    if (root / "old").is_dir() and (leased_keys(root / "old"), read_counts(root / "old")) != (frozenset({A}), COUNTS):
        problems.append("old: what version 0.3 kept is lost")
    return problems


def damage(root: Path, excused: Iterable[str] = ()) -> list[str]:
    """What `verify` finds in the stores."""
    found = []
    for name in (*STORES, *(f"{name}/prefixes" for name in STORES)):
        if name not in excused and (root / name).is_dir():
            found += [f"verify: {problem}" for problem in verify(Store(root / name)).problems.values()]
    return found


def message_problems(code: int, out: str, err: str) -> list[str]:
    """What is wrong with how a run ended that was not killed: a traceback, no reason, several reasons."""
    problems = []
    if code not in (0, 1):
        problems.append(f"exit code {code}")
    if re.search(r"Traceback|Exception ignored|^  File \"", err + out, re.MULTILINE):
        problems.append("a traceback")
    reasons = [line for line in err.splitlines() if line.startswith("pic: error: ")]
    if code == 1 and len(reasons) != 1:
        problems.append(f"{len(reasons)} reasons for exit code 1")
    if code == 0 and reasons:
        problems.append("a reason, and exit code 0")
    return problems
