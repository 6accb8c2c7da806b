"""The fuzzer: cases of every surface, in a few processes; everything that must not be is counted and saved.

    python -m hostile.fuzz --cases 20000 --seed 1         all surfaces
    python -m hostile.fuzz objects --seed 1 --case 123    one case again, in this process

A case is a pure function of seed, surface and number. Exit code 1 if anything failed; the directories of failed cases
are kept below `--keep`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from hostile.judge import Problem

KEPT_OF_A_KIND = 3  # directories of failed cases
_BATCH = 50
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where an fsync costs nothing


@dataclass(frozen=True)
class Result:
    """What one case came to."""

    surface: str
    number: int
    what: str
    codes: tuple[int, ...]
    problems: tuple[Problem, ...]
    seconds: float


@dataclass
class Tally:
    """Results of one surface."""

    cases: int = 0
    answered: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.cases += 1
        self.answered += not result.problems and not any(result.codes)
        self.refused += not result.problems and any(result.codes)
        self.seconds += result.seconds
        self.failures.update({problem.kind for problem in result.problems})


class Worker:
    """Runs cases in this process; what it needs is made below a temporary directory."""

    def __init__(self, root: Path, keep: Path | None) -> None:
        from hostile.scene import Scene, quiet
        from hostile.surfaces import SURFACES

        quiet()
        self.scene, self._keep = Scene(root), keep
        self._surfaces = {name: kind(self.scene) for name, kind in SURFACES.items()}
        self._kinds: Counter[str] = Counter()

    def run(self, surface: str, seed: int, number: int) -> Result:
        """Run one case. What failed is run again: a machine that was busy is no failure."""
        result = self._run(surface, seed, number)
        return self._run(surface, seed, number) if result.problems else result

    def _run(self, surface: str, seed: int, number: int) -> Result:
        from hostile.scene import inside

        started = time.monotonic()
        with inside(self.scene.judge.case_dir):
            case = self._surfaces[surface].make(random.Random(f"{seed} {surface} {number}"))
            (self.scene.root / "what").write_text(case.what, errors="backslashreplace")
            codes, problems = self.scene.judge.run(case)
            self._surfaces[surface].opened.close()
            result = Result(surface, number, case.what, tuple(codes), tuple(problems), time.monotonic() - started)
            if problems and self._keep is not None and self._is_new(result):
                save(result, Path.cwd(), self._keep)
        return result

    def _is_new(self, result: Result) -> bool:
        """Whether few failures of its kind were seen."""
        kinds = {f"{result.surface} {problem.kind}" for problem in result.problems}
        self._kinds.update(kinds)
        return min(self._kinds[kind] for kind in kinds) <= KEPT_OF_A_KIND


def plan(names: Sequence[str], cases: int) -> list[tuple[str, range]]:
    """Batches of case numbers, by surface in proportion to its weight, of all surfaces in turn."""
    from hostile.surfaces import SURFACES

    total = sum(SURFACES[name].weight for name in names)
    counts = {name: -(-cases * SURFACES[name].weight // total) for name in names}
    batches = [(start / count, name, start) for name, count in counts.items() for start in range(0, count, _BATCH)]
    return [(name, range(start, min(start + _BATCH, counts[name]))) for _, name, start in sorted(batches)]


@dataclass
class Running:
    """A worker process, and the cases that it still has to run."""

    process: SpawnProcess
    root: Path
    surface: str = ""
    left: list[int] = field(default_factory=list)


class Pool:
    """Worker processes. One that dies amid a case is replaced, and that case has failed."""

    def __init__(self, batches: Sequence[tuple[str, Sequence[int]]], seed: int, keep: Path | None) -> None:
        self._queue, self._seed, self._keep = list(reversed(batches)), seed, keep
        self._running: dict[Connection, Running] = {}

    def run(self, jobs: int) -> Iterator[Result]:
        """Results as they come."""
        with tempfile.TemporaryDirectory(prefix="hostile-", dir=SCRATCH) as root:
            for _ in range(min(jobs, len(self._queue))):
                self._start(Path(root).resolve())
            while self._running:
                for connection in wait([*self._running]):
                    assert isinstance(connection, Connection)
                    yield self._receive(connection, Path(root).resolve())

    def _start(self, root: Path) -> None:
        context, own = get_context("spawn"), Path(tempfile.mkdtemp(dir=root))
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, own, self._seed, self._keep), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = Running(process, own)
        self._feed(ours)

    def _feed(self, connection: Connection) -> None:
        if not self._queue:
            connection.send(None)
            self._running.pop(connection).process.join()
            return
        worker = self._running[connection]
        worker.surface, numbers = self._queue.pop()
        worker.left = list(numbers)
        connection.send((worker.surface, worker.left))

    def _receive(self, connection: Connection, root: Path) -> Result:
        worker = self._running[connection]
        try:
            result: Result = connection.recv()
        except (EOFError, OSError):
            return self._replace(connection, root)
        worker.left.remove(result.number)
        if not worker.left:
            self._feed(connection)
        return result

    def _replace(self, connection: Connection, root: Path) -> Result:
        """The failure of the case at which a process died; another process runs the others."""
        worker = self._running.pop(connection)
        worker.process.join()
        number, *others = worker.left
        what = (worker.root / "what").read_text() if (worker.root / "what").exists() else "before its first case"
        why = Problem("killed", f"exit code {worker.process.exitcode}: hung in C, or out of memory")
        result = Result(worker.surface, number, what, (), (why,), 0.0)
        if self._keep is not None:
            save(result, worker.root / "case", self._keep)
        shutil.rmtree(worker.root, ignore_errors=True)
        self._queue += [(worker.surface, others)] if others else []
        if self._queue:
            self._start(root)
        return result


def run_here(batches: Sequence[tuple[str, Sequence[int]]], seed: int, keep: Path | None) -> Iterator[Result]:
    """Results of cases that run in this process, which one of them may kill."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=SCRATCH) as root:
        worker = Worker(Path(root).resolve(), keep)
        for surface, numbers in batches:
            for number in numbers:
                yield worker.run(surface, seed, number)


def serve(connection: Connection, root: Path, seed: int, keep: Path | None) -> None:
    """A worker process: batches in, results out."""
    worker = Worker(root, keep)
    while (batch := connection.recv()) is not None:
        surface, numbers = batch
        for number in numbers:
            connection.send(worker.run(surface, seed, number))


def save(result: Result, directory: Path, keep: Path) -> None:
    """Keep a failed case's directory, but for what is no file, and large ones."""
    target = keep / f"{result.surface}-{result.number}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26:
            copy = target / path.relative_to(directory)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    lines = [result.what, *(f"{problem.kind}: pic {problem.command}: {problem.details}" for problem in result.problems)]
    (target / "FAILED.txt").write_text("\n".join(lines) + "\n", errors="backslashreplace")


def show(result: Result, seed: int) -> None:
    """Print a case, and the command that repeats it."""
    print(f"{'FAILED' if result.problems else 'passed'} {result.surface} {result.number}: {result.what}")
    for problem in result.problems:
        print(f"    {problem.kind}: pic {problem.command}\n        {problem.details}".replace("\x1b", "\\x1b"))
    again = f"PYTHONPATH=tools:tests python -m hostile.fuzz {result.surface} --seed {seed} --case {result.number}"
    print(f"    again: {again}")


def report(tallies: dict[str, Tally], seconds: float) -> dict[str, Any]:
    rows = {
        name: {"cases": tally.cases, "answered": tally.answered, "refused": tally.refused,
               "failures": dict(tally.failures), "seconds": round(tally.seconds, 1)}
        for name, tally in tallies.items()
    }  # fmt: skip
    failed = sum(tally.cases - tally.answered - tally.refused for tally in tallies.values())
    return {"cases": sum(tally.cases for tally in tallies.values()), "failed": failed,
            "seconds": round(seconds, 1), "surfaces": rows}  # fmt: skip


def main() -> None:
    from hostile.surfaces import SURFACES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surfaces", nargs="*", choices=[*SURFACES, []], metavar=f"{{{','.join(SURFACES)}}}")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one, in this process")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; 0: this one")
    parser.add_argument("--keep", type=Path, default=Path(".hostile"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names, keep = options.surfaces or list(SURFACES), options.keep.absolute()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if options.case is not None:
        with tempfile.TemporaryDirectory(prefix="hostile-", dir=SCRATCH) as root:
            result = Worker(Path(root).resolve(), keep).run(names[0], options.seed, options.case)
        show(result, options.seed)
        raise SystemExit(bool(result.problems))
    started, tallies = time.monotonic(), {name: Tally() for name in names}
    batches = plan(names, options.cases)
    pool = Pool(batches, options.seed, keep)
    results = pool.run(options.jobs) if options.jobs else run_here(batches, options.seed, keep)
    for number, result in enumerate(results, 1):
        tallies[result.surface].add(result)
        if number % 2000 == 0:
            print(f"{number:,d} cases, {time.monotonic() - started:.0f} s", file=sys.stderr)
        if result.problems:
            show(result, options.seed)
    done = report(tallies, time.monotonic() - started)
    print(json.dumps(done, indent=1))
    if options.out:
        options.out.write_text(json.dumps(done, indent=1) + "\n")
    raise SystemExit(bool(done["failed"]))


if __name__ == "__main__":
    main()
