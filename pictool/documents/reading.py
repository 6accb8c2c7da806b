"""Reading files in a bounded process: what is a document, and what is not, and why."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pictool.bounded_process import BoundedProcess, ProcessFailure
from pictool.documents.base import MAX_FILE_BYTES, MAX_TEXT, Section, normalised
from pictool.errors import InputError
from pictool.runtime.machine import installed
from pictool.store.readings import Readings

LIMIT_S = 60.0  # for a file
LIMIT_BYTES = 1536 << 20
_LIBRARIES = ("charset-normalizer", "kreuzberg", "pypdf", "selectolax")
_MAX_REPLY = MAX_TEXT * 4  # bytes of a command's output


@dataclass(frozen=True)
class Document:
    """A file that was read, or `problem`, why it was not.

    `notes`: what of it is in no section: pages without text, pictures, attachments.
    `name`: of what was kept of it (`Readings`); what the moment or a command decides has none.
    `is_withheld`: it, or a folder, is there, but the system does not let it be read, so that what is in it is unknown.
    """

    path: Path
    reader: str = ""
    sections: tuple[Section, ...] = ()
    problem: str = ""
    is_withheld: bool = False
    notes: tuple[str, ...] = ()
    name: str = ""

    @property
    def text(self) -> str:
        """All of it, in its order."""
        return "\n\n".join(section.text for section in self.sections) + "\n"

    @property
    def reason(self) -> str:
        """Why it was not read, or not wholly."""
        return self.problem or "; ".join(self.notes)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason or self.reader}"


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
        (name,) = self.names_of([path])
        document = self.kept(path, name)
        if document is None:
            reply = self._ask(path)
            if "failure" in reply or self._readings is None or self.names_of([path]) != [name]:
                name = ""  # also of a file that was changed meanwhile
            document = _document(path, reply, name)
            if name and self._readings is not None:
                self._readings.add(name, json.dumps(reply).encode())
        is_final = not document.problem or document.is_withheld or document.problem.startswith("is empty")
        return document if self._command is None or is_final else self._run(path, self._command)

    def names_of(self, paths: Sequence[Path]) -> list[str]:
        """What readings of files follow from: their content, suffix, and the versions of what reads; "": of none.

        A file that has not changed since it was last hashed is not opened.
        """
        if self._readings is None:
            return [""] * len(paths)
        contents = zip(paths, self._readings.contents(paths, MAX_FILE_BYTES), strict=True)
        return [digest(content, path.suffix.lower(), _versions()) if content else "" for path, content in contents]

    def kept(self, path: Path, name: str) -> Document | None:
        """The document of this name, if it is kept."""
        if name and self._readings is not None:
            with suppress(LookupError, ValueError, TypeError, AttributeError, RecursionError):
                return _document(path, json.loads(self._readings.get([name])[name]), name)
        return None

    def read_bytes(self, data: bytes, suffix: str = "") -> Document:
        """The document of what somebody sent."""
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            file.write(data)
            file.flush()
            return self.read(Path(file.name))

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
            return Document(path, problem=f"{words[0]} exited with {done.returncode} ({said})")
        if len(done.stdout) > _MAX_REPLY:
            return Document(path, problem=f"{words[0]} printed more than {_MAX_REPLY >> 20} MiB of text")
        pages = [normalised(page) for page in done.stdout.decode(errors="replace").split("\f")]
        places = [f"p. {number}" if len(pages) > 1 else "" for number in range(1, len(pages) + 1)]
        sections = tuple(Section(page, place) for page, place in zip(pages, places, strict=True) if page.strip())
        return Document(path, Path(words[0]).name, sections, "" if sections else f"{words[0]} printed no text")


def read_whole(path: Path, on_note: Callable[[str], None] = lambda _: None) -> str:
    """The text of a file that is named alone.

    Args:
        on_note: called with what was not read.

    Raises:
        InputError: it cannot be read.
    """
    with FileReader() as reader:
        document = reader.read(path)
    if document.problem:
        raise InputError(str(document))
    if document.notes:
        on_note(str(document))
    return document.text


def _folder_problem(folder: Path) -> str:
    """Why a folder cannot be listed."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        return f"cannot be listed ({error.strerror})"
    return "is a folder that could not be listed at first"


def digest(*values: object) -> str:
    """A name for what follows from these values, which are JSON's."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _document(path: Path, reply: Mapping[str, Any], name: str) -> Document:
    """The document of a reply of `reader_process`; one that is none raises what it raises."""
    problem = reply.get("unreadable", reply.get("failure"))
    if problem is not None:
        return Document(path, problem=str(problem), is_withheld="withheld" in reply, name=name)
    sections = tuple(Section(str(text), str(place)) for text, place in reply["sections"])
    return Document(path, str(reply["reader"]), sections, notes=tuple(map(str, reply["notes"])), name=name)


@cache
def _versions() -> list[str | None]:
    """The code of these readers, and the versions of what they read with and of other packages' readers."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    others = [point.dist.name for point in entry_points(group="pictool.readers") if point.dist is not None]
    return [code.hexdigest(), *map(installed, (*_LIBRARIES, *sorted(others)))]


def parse_command(command: str) -> list[str]:
    """The words of `--reader`. Raises InputError: no `{}`, or quotes that do not end."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--reader {command!r}: {error}") from error
    if not any("{}" in word for word in words):
        raise InputError(f"--reader {command!r}: must contain {{}} in place of the file name")
    return words
