"""A results file: a header, then one row per line. A run that was killed is continued; two at once are refused.

The file is append-only. All rows of a unit of work are written at once and synced; a last line that is not whole was
being written when its process was killed, and is done again.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pictool.errors import InputError, StoreError
from pictool.eval.header import FORMAT, Header
from pictool.eval.row import Row

_BEGINNING = f'{{"format": "{FORMAT}"'.encode()


class Results:
    """An open results file, locked. `rows` are those that it holds, by case and label."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, rows: Mapping[tuple[str, str], Row]) -> None:
        self.path, self.header = path, header
        self.rows = dict(rows)
        self._file = file

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows, so that they last.

        Raises:
            StoreError: the disk is full; what was written before stays.
        """
        _write(self.path, self._file, [row.report() for row in rows])
        self.rows |= {row.key: row for row in rows}


@contextmanager
def open_results(
    path: Path, asked: Header, force: bool = False, on_note: Callable[[str], None] = lambda _: None
) -> Iterator[Results]:
    """Continue the results file of the experiment `asked`, or begin it.

    Args:
        force: begin anew, whatever experiment the file holds.
        on_note: told what was dropped.

    Raises:
        InputError: no results file, one of another experiment, a damaged one, or one that another process writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path}: is no regular file; name another with -o")
    with path.open("a+b") as file:
        _lock(path, file)
        file.seek(0)
        data = file.read()
        if not _is_ours(data):
            raise InputError(f"{path}: is no results file of pic eval; name another with -o")
        lines = [] if force else data.split(b"\n")[:-1]  # without what stands behind the last line break
        if not lines:
            file.truncate(0)
            _write(path, file, [asked.report()])
            yield Results(path, file, asked, {})
            return
        header = _read_header(path, lines[0])
        header.require_same(asked, path)
        rows, is_torn = _read_rows(path, lines[1:])
        whole = b"".join(line + b"\n" for line in (lines[:-1] if is_torn else lines))
        if len(whole) < len(data):
            on_note(f"{path}: the last line is not whole; it is dropped, and done again")
            file.truncate(len(whole))
        yield Results(path, file, header, rows)


def _lock(path: Path, file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path}: another process is writing it; wait for it, or name another with -o") from error


def _is_ours(data: bytes) -> bool:
    """Whether it begins like a results file; one that is shorter than that may be cut off."""
    return data[: len(_BEGINNING)] == _BEGINNING[: len(data)]


def _read_header(path: Path, line: bytes) -> Header:
    try:
        return Header.of(_parse(line))
    except InputError as error:
        raise InputError(
            f"{path}: line 1: {error}; name another file with -o, or begin this one anew with --force"
        ) from error


def _read_rows(path: Path, lines: Sequence[bytes]) -> tuple[dict[tuple[str, str], Row], bool]:
    """The rows of the lines after the header, and whether the last one cannot be read."""
    rows: dict[tuple[str, str], Row] = {}
    for number, line in enumerate(lines, 2):
        try:
            row = Row.of(_parse(line))
        except InputError as error:
            if number == len(lines) + 1:
                return rows, True
            raise InputError(f"{path}: line {number}: {error}; take the line out, and it is done again") from error
        if row.key in rows:
            raise InputError(f"{path}: line {number}: case {row.id} under {row.label} stands there twice; take one out")
        rows[row.key] = row
    return rows, False


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("is no JSON") from error


def _write(path: Path, file: BinaryIO, values: Sequence[Any]) -> None:
    text = "".join(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values)
    try:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written ({error.strerror}); make room and run the command again, it continues"
        ) from error
