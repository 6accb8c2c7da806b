"""Faults of a store while it is served: files that change, and system calls that fail."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from faults.shim import ERRORS, Action, Fault, Kind, SharedPlan

from pictool.store.store import Store

Undo = Callable[[], object]
_READING = (Kind.OPEN, Kind.READ, Kind.STAT, Kind.LIST, Kind.TIMES)
_FAULT_S, _PAUSE_S = 0.15, 0.2  # that a fault lasts at most, and that there is none
_DISK_ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE)


class Storm(threading.Thread):
    """Spoils a store, a fault at a time, each for a short while, until it is stopped; then all of it is as it was.

    Args:
        unspoilt: a copy of the store that no fault reaches.
        plan: what the processes that serve the store follow; None: files are changed, and no call fails.
    """

    def __init__(self, store: Store, unspoilt: Store, plan: SharedPlan | None, seed: int) -> None:
        super().__init__(name="storm", daemon=True)
        self._root, self._unspoilt, self._plan = store.root, unspoilt, plan
        self._store, self._keys, self._draw = store, unspoilt.keys(), random.Random(f"storm {seed}")
        self._ends = threading.Event()
        self.counts: Counter[str] = Counter()  # faults of every kind
        self.error: BaseException | None = None

    def stop(self) -> None:
        """End the last fault. Raises what ended the thread, if anything did."""
        self._ends.set()
        self.join()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        kinds = [self._fail_once, self._fail_on, self._cut_reads] * (self._plan is not None)
        kinds += [self._remove, self._truncate, self._flip, self._swap, self._grow, self._replace, self._hide]
        try:
            while not self._ends.is_set():
                kind = self._draw.choice(kinds)
                self.counts[kind.__name__.strip("_")] += 1
                undo = kind()
                self._ends.wait(self._draw.uniform(0, _FAULT_S))
                undo()
                self._ends.wait(self._draw.uniform(0, _PAUSE_S))
        except BaseException as error:
            self.error = error

    # System calls

    def _set(self, fault: Fault) -> Undo:
        assert self._plan is not None
        self._plan.set(self._root, fault)
        return partial(self._plan.set, self._root, Fault())

    def _fail_once(self) -> Undo:
        kind = self._draw.choice(list(Kind))
        number = self._draw.choice(ERRORS[kind])
        return self._set(Fault(frozenset({kind}), Action.FAIL, number, self._draw.randrange(1, 30)))

    def _fail_on(self) -> Undo:
        """A disk that is gone for a while, or of which a kind of call is."""
        kinds = frozenset(Kind) if self._draw.random() < 0.3 else frozenset({self._draw.choice(_READING)})
        return self._set(Fault(kinds, Action.FAIL_ON, self._draw.choice(_DISK_ERRORS), self._draw.randrange(1, 10)))

    def _cut_reads(self) -> Undo:
        return self._set(Fault(frozenset({Kind.READ}), Action.SHORT, 0, self._draw.randrange(1, 10)))

    # Files. Each is put back whole, by a rename, as an object is written.

    def _restore(self, key: str) -> None:
        path, whole = self._store.path(key), self._root / "tmp" / f"whole-{key[:8]}"
        for directory in (path.parent, whole.parent):
            directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._unspoilt.path(key), whole)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(whole, path)

    def _of_one(self, spoil: Callable[[Path], object]) -> Undo:
        keys = self._draw.sample(self._keys, self._draw.choice((1, 1, 4)))
        for key in keys:
            with suppress(FileNotFoundError):
                spoil(self._store.path(key))

        def restore() -> None:
            for key in keys:
                self._restore(key)

        return restore

    def _remove(self) -> Undo:
        return self._of_one(Path.unlink)

    def _truncate(self) -> Undo:
        share = self._draw.random()
        return self._of_one(lambda path: os.truncate(path, int(path.stat().st_size * share)))

    def _flip(self) -> Undo:
        def flip(path: Path) -> None:
            with path.open("r+b") as file:
                at = self._draw.randrange(path.stat().st_size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << self._draw.randrange(8)]))

        return self._of_one(flip)

    def _swap(self) -> Undo:
        """Another object under this name."""
        return self._of_one(lambda path: shutil.copyfile(self._unspoilt.path(self._draw.choice(self._keys)), path))

    def _grow(self) -> Undo:
        """A file that another program writes in place, slowly."""

        def grow(path: Path) -> None:
            data = path.read_bytes()
            with path.open("wb", buffering=0) as file:
                for start in range(0, len(data), len(data) // 4):
                    file.write(data[start : start + len(data) // 4])
                    self._ends.wait(0.02)

        return self._of_one(grow)

    def _replace(self) -> Undo:
        """What is no file under the name of one."""

        def replace(path: Path) -> None:
            path.unlink()
            kind = self._draw.randrange(4)
            if kind == 0:
                path.mkdir()
            elif kind == 1:
                os.mkfifo(path)
            elif kind == 2:
                path.symlink_to(path)
            else:
                path.symlink_to("/dev/zero")

        return self._of_one(replace)

    def _hide(self) -> Undo:
        """A directory that is moved away: a file system that is not there."""
        shards = [path for path in (self._root / "objects").iterdir() if path.is_dir()]
        path = self._root / "objects" if self._draw.random() < 0.2 else self._draw.choice(shards)
        away = self._root.with_name("away")
        path.rename(away)

        def bring_back() -> None:
            for _ in range(100):
                with suppress(OSError):  # the server makes it again, to write what a request compiled
                    away.rename(path)
                    return
                shutil.copytree(path, away, dirs_exist_ok=True)
                shutil.rmtree(path, ignore_errors=True)
            raise AssertionError(f"{path}: cannot be brought back")

        return bring_back
