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
            codes, problems = self.scene.judge.run(case)
            self._surfaces[surface].end()
            result = Result(surface, number, case.what, tuple(codes), tuple(problems), time.monotonic() - started)
            if problems:
                self._save(result)
        return result

    def _save(self, result: Result) -> None:
        kinds = {f"{result.surface} {problem.kind}" for problem in result.problems}
        self._kinds.update(kinds)
        if self._keep is not None and min(self._kinds[kind] for kind in kinds) <= KEPT_OF_A_KIND:
            target = self._keep / f"{result.surface}-{result.number}"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(
                ".", target, symlinks=True, dirs_exist_ok=True,
                ignore=lambda directory, names: [name for name in names if _is_special(Path(directory, name))],
            )  # fmt: skip
            lines = [result.what, *(f"{p.kind}: pic {p.command}: {p.details}" for p in result.problems)]
            (target / "FAILED.txt").write_text("\n".join(lines) + "\n", errors="backslashreplace")


def _is_special(path: Path) -> bool:
    return not (path.is_file() or path.is_dir()) or (path.is_file() and path.stat().st_size > 1 << 26)


def plan(names: Sequence[str], cases: int) -> list[tuple[str, range]]:
    """Batches of case numbers, by surface in proportion to its weight, of all surfaces in turn."""
    from hostile.surfaces import SURFACES

    total = sum(SURFACES[name].weight for name in names)
    batches: list[tuple[float, str, range]] = []
    for name in names:
        count = -(-cases * SURFACES[name].weight // total)
        for start in range(0, count, _BATCH):
            batches.append((start / count, name, range(start, min(start + _BATCH, count))))
    return [(name, numbers) for _, name, numbers in sorted(batches, key=lambda batch: batch[0])]


def run_all(batches: list[tuple[str, range]], seed: int, jobs: int, keep: Path | None) -> Iterator[Result]:
    """Results as they come. A process that dies amid a case is replaced, and that case has failed."""
    queue, context = list(reversed(batches)), get_context("spawn")
    running: dict[Connection, tuple[SpawnProcess, str, list[int]]] = {}

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, seed, keep), daemon=True)
        process.start()
        theirs.close()
        feed(ours, process)

    def feed(connection: Connection, process: SpawnProcess) -> None:
        if queue:
            surface, numbers = queue.pop()
            connection.send((surface, numbers))
            running[connection] = process, surface, list(numbers)
        else:
            connection.send(None)
            running.pop(connection, None)

    for _ in range(min(jobs, len(queue))):
        start()
    while running:
        for connection in [one for one in wait([*running]) if isinstance(one, Connection)]:
            process, surface, left = running[connection]
            try:
                result: Result = connection.recv()
            except (EOFError, OSError):
                process.join()
                del running[connection]
                killed = Problem("killed", f"the process ended with {process.exitcode}: hung in C, or out of memory")
                yield Result(surface, left[0], "", (), (killed,), 0.0)
                if left[1:]:
                    queue.append((surface, left[1:]))  # type: ignore[arg-type]
                if queue:
                    start()
                continue
            left.remove(result.number)
            yield result
            if not left:
                feed(connection, process)


def _serve(connection: Connection, seed: int, keep: Path | None) -> None:
    """A worker process: batches in, results out."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        worker = Worker(Path(root).resolve(), keep)
        while (batch := connection.recv()) is not None:
            surface, numbers = batch
            for number in numbers:
                connection.send(worker.run(surface, seed, number))


def show(result: Result, seed: int) -> None:
    """Print a failed case, and the command that repeats it."""
    print(f"FAILED {result.surface} {result.number}: {result.what}")
    for problem in result.problems:
        print(f"    {problem.kind}: pic {problem.command}\n        {problem.details}".replace("\x1b", "\\x1b"))
    print(f"    again: PYTHONPATH=tests python -m hostile.fuzz {result.surface} --seed {seed} --case {result.number}")


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
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, default=Path(".hostile"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names, keep = options.surfaces or list(SURFACES), options.keep.absolute()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if options.case is not None:
        with tempfile.TemporaryDirectory(prefix="hostile-") as root:
            result = Worker(Path(root).resolve(), keep).run(names[0], options.seed, options.case)
        show(result, options.seed)
        raise SystemExit(bool(result.problems))
    started, tallies = time.monotonic(), {name: Tally() for name in names}
    for result in run_all(plan(names, options.cases), options.seed, options.jobs, keep):
        tallies[result.surface].add(result)
        if result.problems:
            show(result, options.seed)
    done = report(tallies, time.monotonic() - started)
    print(json.dumps(done, indent=1))
    if options.out:
        options.out.write_text(json.dumps(done, indent=1) + "\n")
    raise SystemExit(bool(done["failed"]))


if __name__ == "__main__":
    main()
