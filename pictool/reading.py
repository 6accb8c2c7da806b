"""Reading files that others may have made: of a bounded size, no devices, and JSON without surprises."""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, NoReturn

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 80, 80, 80


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`. A pipe or a device is not waited for.

    Raises:
        OSError: no such file, no regular one, or a larger one; `strerror` says which.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        require_regular(path, os.fstat(fd), max_bytes)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:  # it grew
        raise _too_large(path, max_bytes)
    return data


def read_stream(path: Path, max_bytes: int) -> bytes:
    """Read a regular file, or what is written to a pipe until its end, as in `pic compile <(pdftotext a.pdf -)`.

    Raises:
        OSError: as `read_file`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            require_regular(path, os.fstat(fd), max_bytes)
        os.set_blocking(fd, True)  # a pipe that nobody writes to ends at once
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _too_large(path, max_bytes)
    return data


def require_regular(path: Path, status: os.stat_result, max_bytes: int | None = None) -> None:
    """Refuse what is no regular file, or larger than `max_bytes`.

    Raises:
        OSError: `strerror` says which.
    """
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, max_bytes)


def _too_large(path: Path, max_bytes: int) -> OSError:
    size = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
    return OSError(errno.EFBIG, f"is larger than {size}", str(path))


def parse_json(data: str | bytes) -> Any:
    """The value of a JSON text whose numbers are finite.

    Raises:
        ValueError: not UTF-8, not JSON (NaN and Infinity are not), or a number beyond double precision or of thousands
            of digits.
        RecursionError: lists in lists in lists.
    """
    return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def shown(value: Any) -> str:
    """A value as a message shows it: short, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
