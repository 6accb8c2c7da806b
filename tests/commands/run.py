"""Running `pic` in this process: the same entry as the program's, without its seconds of imports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from pictool.commands.app import app


@dataclass(frozen=True)
class Outcome:
    """What one run of `pic` gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def pic(*arguments: object, stdin: str | bytes | None = None) -> Outcome:
    """Run `pic` with these arguments; what would be a traceback is raised here."""
    return run_app(app, *arguments, stdin=stdin)


def run_app(app: typer.Typer, *arguments: object, stdin: str | bytes | None = None) -> Outcome:
    """Run a program of ours with these arguments, as `pic`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def write(path: str | Path, content: str | bytes) -> Path:
    """Write a file, in directories made for it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@dataclass(frozen=True)
class Objects:
    """Objects of one text, made for the shared model, for another model and in bfloat16, and the store with all."""

    mine: Path
    foreign: Path
    half: Path
    store: Path


def without_timing(report: dict[str, Any]) -> dict[str, Any]:
    """What is the same each time, however the documents were named."""
    return {name: value for name, value in report.items() if name not in ("timing", "request")}


def flip(path: Path, offset: int = -200) -> None:
    """Flip one bit; the default is within the last layer of a short text's object."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def section(outcome: Outcome, title: str) -> list[str]:
    """The lines below a heading."""
    assert outcome.code == 0, outcome.err
    blocks = [block.splitlines() for block in outcome.out.strip("\n").split("\n\n")]
    return next(block[1:] for block in blocks if block and block[0].startswith(title))
