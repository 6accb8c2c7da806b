"""One case, run and judged: `pic` in this process, under limits, with everything that it must not do noticed.

What must hold of every command, whatever it reads: exit code 0, 1 or 2; nothing but `SystemExit` raised; for 1 and 2
one line "pic: error: …" that names the input; no more than `MAX_SECONDS` and `MAX_MEMORY`; no file written outside the
case's directory; no control characters in what is printed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any
from unittest import mock

from conversing import converse
from following import follow
from quoting import quote

from pictool.commands import main

MAX_SECONDS, KILL_SECONDS = 5.0, 90.0
MAX_MEMORY = 1 << 30  # bytes that one command may add
MAX_FILE = 1 << 30  # bytes of one file that it may write
_ADDRESS_SPACE = 8 << 30  # beyond what the process has: a bomb ends in a MemoryError, not in the kernel's killer
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MAX_LINE = 3000
_PROGRAMS = {program.__name__: program for program in (converse, follow, quote)}  # others run `pic`
THREADS_S = 3.0  # for so long threads of a command may still clear up


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Check = Callable[[Outcome], "str | None"]  # what is wrong with an answer (exit code 0); None if nothing is


def fine(_: Outcome) -> str | None:
    return None


@dataclass(frozen=True)
class Step:
    """A command, what an error must name (one of `names`; none: anything), and how an answer is checked.

    `limit_s` is longer where a process of its own does the work, whose waiting for a processor the clock does not see.
    """

    arguments: tuple[object, ...]
    names: tuple[str, ...] = ()
    check: Check = fine
    must_answer: bool = False
    limit_s: float | None = None  # MAX_SECONDS


@dataclass(frozen=True)
class Case:
    """A hostile input in the working directory: what was done to it, and the commands that meet it.

    `kept` are files that must stay as they are. `stores` must have no temp file at the end.
    """

    what: str
    steps: tuple[Step, ...]
    kept: Mapping[Path, bytes] = field(default_factory=dict)
    stores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What a command did that it must not: a kind, for counting, and the details."""

    kind: str
    details: str
    command: str = ""


class Hang(BaseException):
    """Raised by the watchdog amid a command."""


class Judge:
    """Runs cases below a root directory; everything outside of it is out of bounds."""

    def __init__(self, root: Path) -> None:
        self.root, self.case_dir = root, root / "case"
        self._escapes: list[str] = []
        self._is_watching = self._is_too_large = False
        self._started, self._limit_s = 0.0, MAX_SECONDS
        sys.addaudithook(self._audit)
        sys.dont_write_bytecode = True
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.signal(signal.SIGXFSZ, self._on_large_file)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, resource.RLIM_INFINITY))

    def run(self, case: Case) -> tuple[list[int], list[Problem]]:
        """The exit codes of a case's commands, and what was wrong."""
        codes, problems = list[int](), list[Problem]()
        around = self._listing()
        for step in case.steps:
            outcome, found = self.run_step(step)
            problems += found
            codes.append(outcome.code)
            if found:
                break
        problems += self._find_harm(case, around)
        return codes, problems

    def run_step(self, step: Step) -> tuple[Outcome, list[Problem]]:
        """Run a command; how it ended, and what was wrong."""
        command = " ".join(str(argument)[:90] for argument in step.arguments)
        self._escapes, self._is_too_large = [], False
        self._limit_s = step.limit_s or MAX_SECONDS
        before, self._started = _reset_peak(), _clock()
        raised, outcome = self._invoke([str(argument) for argument in step.arguments])
        seconds, grown = _clock() - self._started, _peak() - before
        found = [raised] if raised else find_unclear(outcome, step)
        if not found and outcome.code == 0 and (wrong := step.check(outcome)):
            found.append(Problem("wrong answer", wrong))
        if seconds > self._limit_s and raised is None:
            found.append(Problem("hang", f"{seconds:.1f} s"))
        if grown > MAX_MEMORY:
            found.append(Problem("memory", f"{grown >> 20} MB"))
        if self._is_too_large:
            found.append(Problem("disk", f"a file of more than {MAX_FILE >> 20} MB"))
        found += [Problem("outside", escape) for escape in self._escapes]
        return outcome, [replace(problem, command=command) for problem in found]

    def _invoke(self, arguments: list[str]) -> tuple[Problem | None, Outcome]:
        """What was raised, if anything; and what was printed."""
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
        code, raised = 0, None  # type: int, Problem | None
        faulthandler.dump_traceback_later(KILL_SECONDS, exit=True, file=2)
        self._is_watching = True
        try:
            with mock.patch.object(sys, "argv", ["pic", *arguments]), _streams(out, err):
                signal.setitimer(signal.ITIMER_REAL, self._limit_s)
                _PROGRAMS.get(arguments[0], main)()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except Hang as error:
            raised = Problem("hang", _last_frames(error))
        except BaseException as error:
            raised = Problem(f"traceback {type(error).__name__}", f"{_last_frames(error)} ({str(error)[:300]})")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._is_watching = False
            faulthandler.cancel_dump_traceback_later()
        return raised, Outcome(code, _content(out), _content(err))

    def _on_alarm(self, *_: Any) -> None:
        if not self._is_watching:
            return
        left = self._limit_s - (_clock() - self._started)
        if left <= 0:
            raise Hang
        signal.setitimer(signal.ITIMER_REAL, left)

    def _on_large_file(self, *_: Any) -> None:
        self._is_too_large = True

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what is opened to be written, made, moved or removed outside of the root."""
        if not self._is_watching:
            return
        if (
            event == "open"
            and isinstance(arguments[2], int)
            and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            return
        if event in ("open", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.symlink", "os.link", "os.truncate"):
            for name in arguments[: 2 if event in ("os.rename", "os.symlink", "os.link") else 1]:
                follows = event == "os.truncate" or (event == "open" and not arguments[2] & os.O_NOFOLLOW)
                if isinstance(name, str | bytes | os.PathLike) and not self._is_inside(os.fsdecode(name), follows):
                    self._escapes.append(f"{event} {os.fsdecode(name)}")

    def _is_inside(self, name: str, follows: bool) -> bool:
        """Whether a path is within the case's directory, or a device; `follows`: what a link there names is meant."""
        path = os.path.realpath(name) if follows else str(Path(name).parent.resolve() / Path(name).name)
        return path.startswith((str(self.case_dir), "/dev/null", "/dev/zero/", "/dev/fd", "/proc")) or "\0" in name

    def _listing(self) -> set[str]:
        return {str(path) for path in self.root.iterdir()} | {str(path) for path in (self.root / "outside").rglob("*")}

    def _find_harm(self, case: Case, around: set[str]) -> list[Problem]:
        """What the commands together changed that they must not."""
        problems = [Problem("outside", f"{name} was made or removed") for name in self._listing() ^ around]
        for path, content in case.kept.items():
            if not path.is_file() or path.read_bytes() != content:
                problems.append(Problem("harm", f"{path} was changed or is gone"))
        return problems + [Problem("litter", str(path)) for path in self._find_litter(case)]

    def _find_litter(self, case: Case) -> list[Path]:
        """Temp files that stay; a process ends once its threads have removed theirs, which is waited for."""
        until = time.monotonic() + THREADS_S
        while litter := [path for store in case.stores for path in self.case_dir.glob(f"{store}/tmp/*")]:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return litter[:3]


def find_unclear(outcome: Outcome, step: Step) -> list[Problem]:
    """What is wrong with an exit code, an error line, or what was printed."""
    printed = outcome.out + outcome.err
    if outcome.code not in (0, 1, 2):
        return [Problem("exit code", f"{outcome.code}: {outcome.err[-300:]}")]
    if "Traceback (most recent" in printed:
        return [Problem("traceback in output", printed[-500:])]
    is_answer = step.arguments[0] == "link"  # what a model says goes to a pipe as it is
    shown = outcome.err if is_answer else printed
    if found := _CONTROL.search(shown):
        around = shown[max(0, found.start() - 60) : found.end() + 20]
        return [Problem("control characters", ascii(around))]
    if outcome.code == 0:
        return []
    if step.must_answer:
        return [Problem("not healed", outcome.err.strip()[-400:])]
    lines = [line for line in outcome.err.splitlines() if line.startswith(("pic: error: ", "Error: "))]
    if len(lines) != 1 or not outcome.err.rstrip("\n").endswith(lines[0]):
        return [Problem("unclear error", f"{len(lines)} error lines: {outcome.err[-400:]!r}")]
    if len(lines[0]) > _MAX_LINE:
        return [Problem("unclear error", f"a line of {len(lines[0])} characters: {lines[0][:200]}")]
    if step.names and not any(name in lines[0] for name in step.names):
        return [Problem("unclear error", f"names none of {step.names}: {lines[0][:400]}")]
    return []


@contextlib.contextmanager
def _streams(out: IO[str], err: IO[str]) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def _content(stream: io.TextIOWrapper) -> str:
    with contextlib.suppress(ValueError):
        stream.flush()
    buffer = stream.detach()
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", "backslashreplace")


def _last_frames(error: BaseException, count: int = 3) -> str:
    """Where it came from: the last frames of the package and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/pictool/" in frame.filename][-count:]
    return " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed([*ours, *frames[-1:]])
    )


def _clock() -> float:
    """Seconds, without those in which this thread could have run and other processes had the processor."""
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.monotonic() - waited_ns / 1e9


def _reset_peak() -> int:
    """Forget the process's peak of memory; returns the bytes that it has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
