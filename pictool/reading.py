"""Reading files that others may have made: of a bounded size, no devices, and JSON without surprises."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import stat
import time
from collections import Counter
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

MAX_DEPTH = 64  # of JSON that others send
_MAX_TOKENS, _MAX_CONTAINERS = 1 << 20, 1 << 16
_COARSE_NS = 2 * 10**9  # the coarsest times of a file system (FAT): a second change within them may not show
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{},]', re.DOTALL)
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 80, 80, 80


_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


class NotRegularError(OSError):
    """Something that has a file's name, and is none; `strerror` says what it is."""

    def __init__(self, mode: int) -> None:
        super().__init__(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, not a regular file")


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading; what is none is not opened, so that nothing waits. No process inherits it.

    Raises:
        NotRegularError: a directory, pipe, socket or device, or a symbolic link to one.
        OSError: it cannot be opened.
    """
    follows = not flags & os.O_NOFOLLOW
    if not stat.S_ISREG(mode := path.stat(follow_symlinks=follows).st_mode):
        raise NotRegularError(mode)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | flags)
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):  # replaced meanwhile
        os.close(fd)
        raise NotRegularError(mode)
    return fd


class FileState(NamedTuple):
    """What tells a file from another, and from itself before it was written."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        """Whether the file was changed so long ago that another change shows in its times."""
        return time.time_ns() - self.ctime_ns > _COARSE_NS


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`. A pipe or a device is not waited for.

    Raises:
        OSError: no such file, no regular one, or a larger one; `strerror` says which.
    """
    return _read_all(open_regular(path), path, max_bytes)


def read_stream(path: Path, max_bytes: int) -> bytes:
    """Read a regular file, or what is written to a pipe until its end, as in `pic compile <(pdftotext a.pdf -)`.

    Raises:
        OSError: as `read_file`.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        return read_file(path, max_bytes)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # one that nobody writes to ends at once
    os.set_blocking(pipe, True)
    return _read_all(pipe, path, max_bytes)


def is_within(path: Path, directory: Path) -> bool:
    """Whether a file below a directory is in it, and not what a symbolic link to elsewhere names."""
    return path.resolve().is_relative_to(directory.resolve())


def require_size(path: Path, max_bytes: int) -> None:
    """Refuse a larger file. Raises OSError."""
    if path.stat().st_size > max_bytes:
        raise _too_large(path, max_bytes)


def _read_all(fd: int, path: Path, max_bytes: int) -> bytes:
    with open(fd, "rb") as file:
        is_too_large = os.fstat(fd).st_size > max_bytes
        data = b"" if is_too_large else file.read(max_bytes + 1)
    if is_too_large or len(data) > max_bytes:  # it may grow, and a pipe has no size
        raise _too_large(path, max_bytes)
    return data


def _too_large(path: Path, max_bytes: int) -> OSError:
    size = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
    return OSError(errno.EFBIG, f"is larger than {size}", str(path))


def parse_json(data: str | bytes, has_unique_keys: bool = True) -> Any:
    """The value of a JSON text whose numbers are finite.

    Args:
        has_unique_keys: whether an object with the same key twice is refused; else the last one counts.

    Raises:
        ValueError: not UTF-8, not JSON (NaN and Infinity are not), a key that appears twice, or a number beyond double
            precision or of thousands of digits.
        RecursionError: lists in lists in lists.
    """
    pairs = _unique if has_unique_keys else None
    try:
        return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=pairs)
    except RecursionError as error:  # Python's own words differ by its version
        raise RecursionError("lists or objects are nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(twice)} appears twice")
    return values


def require_shape(data: bytes, max_depth: int = MAX_DEPTH, max_containers: int = _MAX_CONTAINERS) -> None:
    """Refuse a JSON text that takes far more time and memory to parse than its bytes do, before it is parsed.

    Raises:
        ValueError: lists and objects in more than `max_depth` of their kind, more than `max_containers` of them, or too
            many values.
    """
    depth = num_containers = 0
    for number, token in enumerate(_TOKEN.finditer(data)):
        match data[token.start()]:
            case 0x5B | 0x7B:  # [ and {
                depth, num_containers = depth + 1, num_containers + 1
            case 0x5D | 0x7D:
                depth -= 1
        if depth > max_depth:
            raise ValueError(f"is nested deeper than {max_depth} levels")
        if number >= _MAX_TOKENS or num_containers > max_containers:
            raise ValueError(f"has more than {max_containers:,d} lists and objects, or {_MAX_TOKENS:,d} values")


def real(value: Any) -> float:
    """A number as a float. Raises ValueError: no number, a truth value, or not finite."""
    with suppress(OverflowError):
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    raise ValueError(f"{shown(value)} is not a finite number")


def whole(value: Any) -> int:
    """A number as an int. Raises ValueError: no whole number, or a truth value."""
    if not real(value).is_integer():
        raise ValueError(f"{shown(value)} is not a whole number")
    return int(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def shown(value: Any) -> str:
    """A value as a message shows it: short, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def file_state(file: Path | int) -> tuple[int, ...]:
    """Device, inode, size and times: a file, or what a descriptor is open on, is taken for unchanged by them."""
    found = os.stat(file)  # noqa: PTH116 (a descriptor, too)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def with_home(name: str | os.PathLike[str]) -> Path:
    """A path with a user's home directory in place of `~` or `~NAME`; as in shells, one of no user stays as it is."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 (Path.expanduser raises)


def exists(name: str | Path) -> bool:
    """Whether there is a file of this name; a text may be longer than any name, or have characters of none."""
    with suppress(OSError, ValueError):
        return Path(name).exists()
    return False
