"""Reading files in a bounded process: what is a document, and what is not, and why."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pictool.bounded_process import BoundedProcess, ProcessFailure
from pictool.documents.base import MAX_TEXT, Section, normalised
from pictool.errors import InputError

LIMIT_S = 60.0  # for a file
LIMIT_BYTES = 1536 << 20
_MAX_REPLY = MAX_TEXT * 4  # bytes of a command's output


@dataclass(frozen=True)
class Document:
    """A file that was read, or `problem`, why it was not."""

    path: Path
    reader: str = ""
    sections: tuple[Section, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem or self.reader}"


class FileReader:
    """Reads files, each within `limit_s` seconds and `LIMIT_BYTES`; a context manager.

    Args:
        command: reads what no reader knows, as `pandoc -t plain {}`: the file's name takes the place of `{}`. Its
            output is the text, whose form feeds are ends of pages.
    """

    def __init__(self, command: str | None = None, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._command = None if command is None else parse_command(command)
        self._process = BoundedProcess("pictool.documents.reader_process", limit_s, LIMIT_BYTES)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that reads."""
        self._process.close()

    def read(self, path: Path) -> Document:
        """A file's document; what cannot be read has a problem, and nothing is raised."""
        try:
            reply = self._process.ask({"path": str(path.absolute())})
        except ProcessFailure as error:
            reply = {"failure": str(error)}
        problem = reply.get("unreadable") or reply.get("failure")
        if problem is None:
            sections = tuple(Section(text, place) for text, place in reply["sections"])
            return Document(path, reply["reader"], sections)
        if self._command is not None and not problem.startswith("is empty"):
            return self._run(path, self._command)
        return Document(path, problem=problem)

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


def parse_command(command: str) -> list[str]:
    """The words of `--reader`. Raises InputError: no `{}`, or quotes that do not end."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--reader {command!r}: {error}") from error
    if not any("{}" in word for word in words):
        raise InputError(f"--reader {command!r}: must contain {{}} in place of the file's name")
    return words
