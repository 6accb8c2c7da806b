from __future__ import annotations

import os
import random
import shutil
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from hostile.judge import Case
from hostile.scene import Scene


class Surface(ABC):
    """A kind of hostile input. `weight` is its share of all cases; `opened` is closed after each of them."""

    name: ClassVar[str]
    weight: ClassVar[int]

    def __init__(self, scene: Scene) -> None:
        self.scene, self.opened = scene, ExitStack()

    @abstractmethod
    def make(self, draw: random.Random) -> Case:
        """Write a case into the working directory, which is empty; the same `draw` makes the same case."""


def put_something_else(path: Path, draw: random.Random, outside: Path) -> str:
    """Put something at `path` that is no regular file of its own; returns what."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    links = {
        "a link to /dev/zero": "/dev/zero", "a link to /dev/null": "/dev/null", "a link to itself": path.name,
        "a link to nowhere": "nosuch", "a link to a directory": ".", "a link outside": str(outside / "victim"),
        "a link to /proc": "/proc/self/mem",
    }  # fmt: skip
    kind = draw.choice(["a fifo", "a directory", "a full directory", "an empty file", *links])
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == "a fifo":
        os.mkfifo(path)
    elif kind == "an empty file":
        path.write_bytes(b"")
    else:
        path.mkdir()
        if kind == "a full directory":
            (path / "x").write_text("x")
    return kind
