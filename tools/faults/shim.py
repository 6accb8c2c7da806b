"""The preloaded library of `fault.c`: built with the C compiler, and armed in a process with a plan of one fault."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("fault.c")
VARIABLE = "FAULT_LIBRARY"  # names the library in the process that was started with it
PLAN_VARIABLE = "FAULT_PLAN"  # names the file of the plan with which a process, and all that it starts, is armed


class Kind(IntEnum):
    """What a call does; `enum kind` of fault.c."""

    OPEN = 0
    CREATE = 1
    READ = 2
    WRITE = 3
    SYNC = 4
    RENAME = 5
    LINK = 6
    UNLINK = 7
    MKDIR = 8
    LOCK = 9
    TRUNCATE = 10
    STATVFS = 11
    MMAP = 12
    STAT = 13
    LIST = 14
    TIMES = 15


class Action(IntEnum):
    """What is done at the n-th call; `enum action` of fault.c."""

    PASS = 0
    FAIL = 1  # with an errno, once
    FAIL_ON = 2  # this call and all that follow
    SHORT = 3  # read or write half of it
    KILL = 4  # before the call
    KILL_AFTER = 5  # after it, or in the middle of a write
    SIGNAL = 6


CHANGES = frozenset(
    {
        Kind.CREATE, Kind.WRITE, Kind.SYNC, Kind.RENAME, Kind.LINK, Kind.UNLINK, Kind.MKDIR, Kind.LOCK, Kind.TRUNCATE,
        Kind.TIMES,
    }
)  # fmt: skip

# The errors that each kind of call may have on a Linux file system, NFS among them.
ERRORS: dict[Kind, tuple[int, ...]] = {
    Kind.OPEN: (errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE, errno.EINTR),
    Kind.CREATE: (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE, errno.EINTR),
    Kind.READ: (errno.EIO, errno.ESTALE, errno.EINTR),
    Kind.WRITE: (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EINTR),
    Kind.SYNC: (errno.EIO, errno.ENOSPC, errno.EINTR),
    Kind.RENAME: (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE),
    Kind.LINK: (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS),
    Kind.UNLINK: (errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE),
    Kind.MKDIR: (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS),
    Kind.LOCK: (errno.EIO, errno.ENOLCK, errno.ESTALE, errno.EINTR),
    Kind.TRUNCATE: (errno.EIO, errno.ENOSPC, errno.EINTR),
    Kind.STATVFS: (errno.EIO, errno.ESTALE, errno.EACCES),
    Kind.MMAP: (errno.ENOMEM, errno.EACCES),
    Kind.STAT: (errno.EIO, errno.ESTALE, errno.EACCES),
    Kind.LIST: (errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE),
    Kind.TIMES: (errno.EACCES, errno.EIO, errno.EROFS),
}


class Plan(ctypes.Structure):
    """`struct plan` of fault.c."""

    _fields_ = (
        ("root", ctypes.c_char * 256), ("kinds", ctypes.c_uint), ("action", ctypes.c_int), ("number", ctypes.c_int),
        ("nth", ctypes.c_int), ("total", ctypes.c_int), ("counts", ctypes.c_int * len(Kind)),
        ("hit", ctypes.c_char * 512),
    )  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that happens at the `nth` call of these kinds. `number` is an errno, or a signal's."""

    kinds: frozenset[Kind] = frozenset(Kind)
    action: Action = Action.PASS
    number: int = 0
    nth: int = 0

    def __str__(self) -> str:
        names = {Action.FAIL: errno.errorcode, Action.FAIL_ON: errno.errorcode}.get(self.action, {})
        what = f"{self.action.name} {names.get(self.number, self.number or '')}".strip()
        kinds = (
            ",".join(sorted(kind.name for kind in self.kinds)) if len(self.kinds) < 4 else f"{len(self.kinds)} kinds"
        )
        return f"{what} at {kinds} #{self.nth}"


class SharedPlan:
    """A plan that other processes follow: forked ones that arm it, or, if it is in a file, those that find it there."""

    def __init__(self, file: Path | None = None) -> None:
        size = ctypes.sizeof(Plan)
        if file is None:
            memory = mmap.mmap(-1, size)
        else:
            file.write_bytes(bytes(size))
            with file.open("r+b") as opened:
                memory = mmap.mmap(opened.fileno(), size)
        self.plan = Plan.from_buffer(memory)

    def set(self, root: Path, fault: Fault) -> None:
        """Write the plan, with its results empty."""
        ctypes.memset(ctypes.addressof(self.plan), 0, ctypes.sizeof(Plan))
        self.plan.root = os.fsencode(root)
        self.plan.kinds = sum(1 << kind for kind in fault.kinds)
        self.plan.action, self.plan.number, self.plan.nth = fault.action, fault.number, fault.nth

    @property
    def counts(self) -> dict[Kind, int]:
        """Calls of every kind since `set`."""
        return {kind: self.plan.counts[kind] for kind in Kind}

    @property
    def hit(self) -> str:
        """The call that was acted on; "" if there was none."""
        return os.fsdecode(self.plan.hit)


class Shim(SharedPlan):
    """The library in this process, and memory that it shares with the children that it forks."""

    def __init__(self) -> None:
        super().__init__()
        self._library = ctypes.CDLL(os.environ[VARIABLE])

    def arm(self) -> None:
        self._library.fault_arm(ctypes.byref(self.plan))


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(directory: Path) -> Path:
    """Compile the library into a directory."""
    target = directory / "fault.so"
    command: list[str | Path] = [
        compiler() or "cc",
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        SOURCE,
        "-o",
        target,
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return target


def environment(library: Path) -> dict[str, str]:
    """What a process that is to be armed is started with."""
    preloaded = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return os.environ | {"LD_PRELOAD": preloaded, VARIABLE: str(library)}
