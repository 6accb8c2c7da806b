"""The process that reads files (`bounded_process.py`), which `reading.py` starts.

While a file is read nothing can be opened: no other file, and no connection.

A request has the file's `path`. A reply has `reader`, `sections`, each `[text, place]`, and `notes` of what is in none;
or `unreadable`, what the file is; or `failure`, and with it `withheld` if the system did not let the file be read.
"""

from __future__ import annotations

import encodings
import errno
import importlib
import pkgutil
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pictool.bounded_process import TOO_MUCH_MEMORY, serve_requests
from pictool.documents.base import MAX_FILE_BYTES, MAX_TEXT, Note, Reader, UnreadableError, normalised
from pictool.documents.readers import readers
from pictool.reading import read_file

_KNOWN = {errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.EFBIG}  # gone, no regular file, too large


@cache
def missing_module(reader: Reader) -> str | None:
    """Loads what a reader imports, and every encoding: nothing can be loaded later. Returns what is not installed."""
    for name in reader.modules:
        try:
            module = importlib.import_module(name)
        except ImportError:
            return name.partition(".")[0]
        _load_below(module)
    _load_below(encodings)
    reader.prepare()
    return None


def _load_below(package: ModuleType) -> None:
    """Load the modules of a package, but for those that need what is not installed here."""
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}.", lambda _: None):
        with suppress(ImportError):
            importlib.import_module(module.name)


@contextmanager
def nothing_can_be_opened() -> Iterator[None]:
    """While a file is read no descriptor can be opened: a file that refers to others, or to the network, gets none."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def read(request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to a request."""
    path = Path(request["path"])
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except OSError as error:
        why = error.strerror or str(error)
        return {"unreadable": why} if error.errno in _KNOWN else {"failure": why, "withheld": True}
    if not data.strip():
        return {"unreadable": "is empty"}
    reader = next(reader for reader in readers() if reader.recognises(data, path.suffix.lower()))
    if missing := missing_module(reader):
        return {"unreadable": f"is {reader.name}, for which {missing} is missing: pip install 'pictool[documents]'"}
    with nothing_can_be_opened():
        try:
            return {"reader": reader.name} | _parts(reader, data)
        except UnreadableError as error:
            return {"unreadable": str(error)}
        except MemoryError:
            return {"failure": TOO_MUCH_MEMORY}
        except Exception as error:  # a damaged file can make a library raise anything
            return {"unreadable": f"is damaged ({type(error).__name__}: {' '.join(str(error).split())[:120]})"}


def _parts(reader: Reader, data: bytes) -> dict[str, list[Any]]:
    """The sections of a file, and the notes of what is in none."""
    sections, notes, length, num_damaged = list[tuple[str, str]](), list[str](), 0, 0
    for part in reader.sections(data):
        if isinstance(part, Note):
            notes.append(part.text)
            continue
        text = normalised(part.text)
        length += len(text)
        num_damaged += text.count("\ufffd")
        if length > MAX_TEXT:
            raise UnreadableError(f"has more than {MAX_TEXT >> 20} MiB of text; split it")
        if text.strip():
            sections.append((text, " ".join(part.place.split())))
    if not length:
        raise UnreadableError("; ".join(["has no text", *notes]))
    if num_damaged:
        notes.append(f"{num_damaged:,d} characters are damaged (U+FFFD); these bytes are not text, or not UTF-8")
    return {"sections": sections, "notes": notes}


if __name__ == "__main__":
    serve_requests(read, float(sys.argv[1]), int(sys.argv[2]))
