"""Objects that stay open once they were used: their descriptors, what their headers say, and what of them was checked.

What was checked is not checked again while the file is as it was then (`ObjectFile.is_unchanged`). A file that another
process removed keeps its room on the disk until it is closed here.
"""

from __future__ import annotations

import os
import resource
import time

from pictool.store.objects.format import ObjectFile

_MOST = 512  # objects; their headers take some 50 kB each
_SHARE = 4  # at most one of so many descriptors that this process may have
_CLOSE_S = 5.0  # after so long it is seen which files were removed


class OpenObjects:
    """Open objects by their path; the least recently used are closed. Any number of threads may use it.

    A process has one (`opened`), since its descriptors are counted together; a fork goes on with those of its parent.
    """

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // _SHARE)
        self._files = dict[str, ObjectFile]()  # the least recently used first; each operation on it is atomic
        self._closed = time.monotonic()

    def find(self, path: str) -> ObjectFile | None:
        """The open object at a path, if its file is unchanged. Closing it leaves it open for others."""
        file = self._files.pop(path, None)
        if file is None or not file.is_unchanged():
            return None
        self._files[path] = file
        return file

    def keep(self, path: str, file: ObjectFile) -> ObjectFile:
        """Let an object stay open."""
        file.stays_open = True
        self._files[path] = file
        for least in list(self._files)[: -self._most or None]:
            self._files.pop(least, None)
        if time.monotonic() - self._closed > _CLOSE_S:
            self.close_removed()
        return file

    def close_removed(self) -> None:
        """Close the files that have no name any more: that frees their room on the disk."""
        self._closed = time.monotonic()
        for path, file in list(self._files.items()):
            if not os.fstat(file.fileno()).st_nlink:
                self._files.pop(path, None)


opened = OpenObjects()
