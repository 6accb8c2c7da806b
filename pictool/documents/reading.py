"""Reading files in a bounded process: what is a document, and what is not, and why."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pictool.bounded_process import BoundedProcess, ProcessFailure
from pictool.documents.base import MAX_FILE_BYTES, MAX_TEXT, Section, normalised
from pictool.errors import InputError
from pictool.reading import read_file
from pictool.runtime.machine import installed
from pictool.store.readings import Readings

LIMIT_S = 60.0  # for a file
LIMIT_BYTES = 1536 << 20
_LIBRARIES = ("pypdf", "selectolax", "python-docx", "python-pptx", "openpyxl", "charset-normalizer")
_MAX_REPLY = MAX_TEXT * 4  # bytes of a command's output


@dataclass(frozen=True)
class Document:
    """A file that was read, or `problem`, why it was not.

    `is_withheld`: it, or a folder, is there, but the system does not let it be read, so that what is in it is unknown.
    """

    path: Path
    reader: str = ""
    sections: tuple[Section, ...] = ()
    problem: str = ""
    is_withheld: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.problem or self.reader}"


class FileReader:
    """Reads files, each within `limit_s` seconds and `LIMIT_BYTES`; a context manager.

    Args:
        command: reads what no reader knows, as `pandoc -t plain {}`: the file's name takes the place of `{}`. Its
            output is the text, whose form feeds are ends of pages.
        readings: what was read before, which is not read again; not of the command's.
    """

    def __init__(self, command: str | None = None, limit_s: float = LIMIT_S, readings: Readings | None = None) -> None:
        self._limit_s, self._readings = limit_s, readings
        self._command = None if command is None else parse_command(command)
        self._process = BoundedProcess("pictool.documents.reader_process", limit_s, LIMIT_BYTES)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that reads, and keep what it read."""
        self._process.close()
        if self._readings is not None:
            self._readings.flush()

    def read(self, path: Path) -> Document:
        """A file's document; what cannot be read has a problem, and nothing is raised. Of a folder, why it is none."""
        if os.path.isdir(path):  # noqa: PTH112 (it never raises)
            return Document(path, problem=_folder_problem(path), is_withheld=True)
        name = None if self._readings is None else _name_of(path)
        reply = None if self._readings is None or name is None else self._readings.get(name)
        if reply is None or not _is_whole(reply):
            reply = self._ask(path)
            if self._readings is not None and name is not None and "failure" not in reply:
                self._readings.add(name, reply)
        problem = reply.get("unreadable") or reply.get("failure")
        if problem is None:
            sections = tuple(Section(text, place) for text, place in reply["sections"])
            return Document(path, reply["reader"], sections)
        if reply.get("withheld"):
            return Document(path, problem=problem, is_withheld=True)
        if self._command is not None and not problem.startswith("is empty"):
            return self._run(path, self._command)
        return Document(path, problem=problem)

    def _ask(self, path: Path) -> dict[str, Any]:
        try:
            return self._process.ask({"path": str(path.absolute())})
        except ProcessFailure as error:
            return {"failure": str(error)}

    def _run(self, path: Path, command: Sequence[str]) -> Document:
        """What the user's command makes of a file."""
        name = f"./{path}" if str(path).startswith("-") else str(path)
        words = [word.replace("{}", name) for word in command]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=self._limit_s, check=False,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Document(path, problem=f"{words[0]} takes longer than {self._limit_s:g} s")
        except OSError as error:
            return Document(path, problem=f"{words[0]} cannot be run ({error.strerror})")
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())[-120:]
            return Document(path, problem=f"{words[0]} ended with {done.returncode} ({said})")
        if len(done.stdout) > _MAX_REPLY:
            return Document(path, problem=f"{words[0]} gives more than {_MAX_REPLY >> 20} MiB of text")
        pages = [normalised(page) for page in done.stdout.decode(errors="replace").split("\f")]
        places = [f"p. {number}" if len(pages) > 1 else "" for number in range(1, len(pages) + 1)]
        sections = tuple(Section(page, place) for page, place in zip(pages, places, strict=True) if page.strip())
        return Document(path, Path(words[0]).name, sections, "" if sections else f"{words[0]} gives no text")


def _folder_problem(folder: Path) -> str:
    """Why a folder cannot be listed."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        return f"cannot be listed ({error.strerror})"
    return "is a folder that could not be listed a moment ago"


def _name_of(path: Path) -> str | None:
    """What a reading follows from: the file's content, its suffix, and the versions of what reads; None: unreadable."""
    try:
        content = hashlib.sha256(read_file(path, MAX_FILE_BYTES)).hexdigest()
    except OSError:
        return None
    return hashlib.sha256(json.dumps([content, path.suffix.lower(), _versions()]).encode()).hexdigest()


@cache
def _versions() -> list[str | None]:
    """The code of these readers, and the versions of what they read with and of other packages' readers."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    others = [point.dist.name for point in entry_points(group="pictool.readers") if point.dist is not None]
    return [code.hexdigest(), *map(installed, (*_LIBRARIES, *sorted(others)))]


def _is_whole(reply: Mapping[str, Any]) -> bool:
    """Whether a kept reply is one of `reader_process`."""
    if isinstance(reply.get("unreadable"), str):
        return True
    sections = reply.get("sections")
    return (
        isinstance(reply.get("reader"), str)
        and isinstance(sections, list)
        and all(isinstance(each, list) and len(each) == 2 and all(isinstance(text, str) for text in each)
                for each in sections)
    )  # fmt: skip


def parse_command(command: str) -> list[str]:
    """The words of `--reader`. Raises InputError: no `{}`, or quotes that do not end."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--reader {command!r}: {error}") from error
    if not any("{}" in word for word in words):
        raise InputError(f"--reader {command!r}: must contain {{}} in place of the file's name")
    return words
