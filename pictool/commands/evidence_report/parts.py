"""The parts of `pic evidence`: each runs other commands of `pic`, in a process that ends with this one or at its limit.

A part has rounds, each larger than the one before. The result of a round is in the part's file as soon as it ends, so
a run that was killed goes on with the next round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pictool.commands.console.outputs import write_json
from pictool.errors import InputError
from pictool.reading import parse_json, read_file

GROWTH = 1.5  # a round is not begun if it would end too late when it takes so many times as long as the one before
GRACE_S = 20.0  # for an interrupted command to say what it knows
_MAX_BYTES = 64 << 20
_CHILD = "from pictool.commands.evidence_report.parts import run_child; run_child()"


class PartStatus(StrEnum):
    """What came of a part: all of it; the rounds for which there was time; nothing, for want of time; an error."""

    DONE = "done"
    PARTIAL = "partial"
    LEFT_OUT = "left out"
    FAILED = "failed"


@dataclass(frozen=True)
class EvidencePart:
    """What is to be run.

    Fields:
        name: of its file. weight: its share of the time that is left, among the parts that are left.
        rounds: the arguments of `pic`, round by round; each prints JSON.
    """

    name: str
    title: str
    weight: int
    rounds: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Round:
    """A command that ended. Fields are the keys of the JSON.

    Fields:
        code: its exit code. said: the last line of its notes. result: its JSON; None if it printed none.
    """

    arguments: tuple[str, ...]
    seconds: float
    code: int
    said: str
    result: Any


@dataclass(frozen=True)
class PartRecord:
    """What came of a part: its file. Fields are the keys of the JSON; `why` says why it is not done."""

    name: str
    title: str
    status: PartStatus
    why: str
    seconds: float
    rounds: tuple[Round, ...]

    @property
    def result(self) -> Any:
        """Of the largest round that ended; None if none did."""
        return self.rounds[-1].result if self.rounds else None


def read_record(part: EvidencePart, folder: Path) -> PartRecord:
    """What an earlier run left of this very part; else a record without rounds.

    Raises:
        InputError: the file is damaged.
    """
    empty = PartRecord(part.name, part.title, PartStatus.LEFT_OUT, "not begun", 0.0, ())
    path = folder / f"{part.name}.json"
    if not path.exists():
        return empty
    try:
        values = parse_json(read_file(path, _MAX_BYTES))
        rounds = tuple(Round(**{**each, "arguments": tuple(each["arguments"])}) for each in values["rounds"])
        record = PartRecord(**{**values, "status": PartStatus(values["status"]), "rounds": rounds})
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: is no part of a report; remove it, and it is measured again") from error
    is_same = all(held.arguments == asked for held, asked in zip(rounds, part.rounds, strict=False))
    return record if is_same and len(rounds) <= len(part.rounds) else empty


def run_part(
    part: EvidencePart, record: PartRecord, folder: Path, limit_s: float, note: Callable[[str], None]
) -> PartRecord:
    """Run the rounds that a record lacks, for so many seconds at most, and `GRACE_S`; writes the part's file."""
    ends, before = time.monotonic() + limit_s, record.seconds
    while record.status is not PartStatus.DONE:
        ended = tuple(each for each in record.rounds if each.code in (0, 1))  # an interrupted one is run again
        number, left = len(ended), ends - time.monotonic()
        needed = GROWTH * ended[-1].seconds if ended else 0.0
        if left <= needed:
            if record.seconds and not needed:
                return record  # which says what an earlier run met
            why = f"round {number + 1} of {len(part.rounds)} may take {needed:.0f} s" if needed else "no time was left"
            return _write(replace(record, status=_short(record), why=why), folder)
        note(f"{part.title}: {number + 1} of {len(part.rounds)}, {left:.0f} s at most")
        done, in_time = run_pic(part.rounds[number], left, folder / f"{part.name}.log")
        seconds = before + limit_s - (ends - time.monotonic())
        has_result = done.result is not None
        if has_result:
            record = replace(record, rounds=(*ended, done))
        is_last = len(record.rounds) == len(part.rounds)
        if not in_time:
            status, why = _short(record), f"round {number + 1} did not end in {left:.0f} s"
        elif not has_result:
            status, why = PartStatus.FAILED, done.said or f"exit code {done.code}"
        else:
            status, why = (PartStatus.DONE, "") if is_last else (PartStatus.PARTIAL, "was stopped")
        record = _write(replace(record, status=status, why=why, seconds=seconds), folder)
        if not (in_time and has_result):
            break
    return record


def _short(record: PartRecord) -> PartStatus:
    return PartStatus.PARTIAL if record.rounds else PartStatus.LEFT_OUT


def _write(record: PartRecord, folder: Path) -> PartRecord:
    write_json(folder / f"{record.name}.json", asdict(record))
    return record


def run_pic(arguments: Sequence[str], limit_s: float, log: Path) -> tuple[Round, bool]:
    """Run `pic`, whose notes go to a file, and interrupt it after so many seconds.

    Returns:
        what it said, and whether it ended in time.
    """
    started, in_time = time.monotonic(), True
    with tempfile.TemporaryFile() as out, log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, *arguments],
            stdin=subprocess.PIPE, stdout=out, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            in_time = False
            process.send_signal(signal.SIGINT)
            try:
                code = process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
        finally:
            process.kill()
            process.communicate()
        out.seek(0)
        printed = out.read()
    try:
        result = json.loads(printed)
    except ValueError:
        result = None
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return Round(tuple(arguments), time.monotonic() - started, code, "".join(said), result), in_time


def run_child() -> None:
    """Be `pic` in a process that ends when its parent is gone, and with it the other end of standard input."""
    from pictool.commands import main

    def end_with_parent() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    main()
