"""Remotes with faults, which processes elsewhere can make."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

from pictool.store.objects.format import EncodedObject
from pictool.store.remote.remote import Remote


class SlowAndHalfFailing(Remote):
    """Every second write breaks off, at random, and every one takes a while."""

    def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
        time.sleep(0.02)
        if random.random() < 0.5:
            raise ConnectionResetError("the connection was reset")
        return super()._put(source, target)


class Full(Remote):
    """Has room for 20 objects, and for more where a file `more` is."""

    def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
        root = Path(self.url)
        if not (root / "more").exists() and sum(1 for _ in root.glob("objects/*/*.kvo")) >= 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super()._put(source, target)


class Deadly(Remote):
    """A process that writes an object whose text has the word POISON dies. A file beside the remote counts them."""

    def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
        if isinstance(source, EncodedObject) and b"POISON" in source.read(0, source.num_bytes):
            with Path(f"{self.url}.deaths").open("ab") as deaths:
                deaths.write(b".")
            os._exit(1)
        return super()._put(source, target)
