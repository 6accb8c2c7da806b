"""Faults and kills in every command that reads or writes a store, a remote or an output: `make faults`.

    python -m faults [--operation NAME …] [--most N] [--seed N] [--report FILE]

Each run has a copy of one world of files. A library that is preloaded fails a system call of it (`fault.c`), sends a
signal, or kills the process there; or the process is killed at a random time, or beside another. What must hold then
(issue 22): an exit code of 0 or 1 with one line that says why, or 130 after an interrupt, and no traceback; no object
lost or changed; no other answer; nothing left after the next gc; and the same command, run again, does what it should.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from faults.cases import PAIRS, cases_of
from faults.harness import Harness, Result
from faults.operations import OPERATIONS
from faults.shim import VARIABLE, build, environment

SEED, MOST = 22, 14


def in_shards(harness: Harness, names: Sequence[str], options: argparse.Namespace) -> list[Result]:
    """Judge all cases of these operations, each operation in one of several processes."""
    queue, fill = os.pipe()
    os.write(fill, bytes(range(len(names))))
    os.close(fill)
    pids = []
    for shard in range(options.shards):
        sys.stdout.flush()
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            harness.use(harness.base / f"shard-{shard}")
            with (harness.base / f"shard-{shard}.jsonl").open("w") as file:
                while index := os.read(queue, 1):
                    _judge_all(harness, names[index[0]], options, file)
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(ends):
        raise SystemExit("a shard ended early")
    lines = [line for shard in range(options.shards) for line in (harness.base / f"shard-{shard}.jsonl").open()]
    return [Result(**json.loads(line)) for line in lines]


def _judge_all(harness: Harness, name: str, options: argparse.Namespace, file: TextIO) -> None:
    begun, bad, reference = time.monotonic(), 0, harness.reference(name)
    cases = cases_of(harness.operations[name], reference.counts, reference.ended.seconds, options.most, options.seed)
    for case in cases:
        result = harness.judge(case)
        bad += bool(result.problems)
        print(json.dumps(asdict(result)), file=file, flush=True)
        if result.problems and bad <= 5:
            print(describe(result), flush=True)
    kinds = ", ".join(f"{count} {group}" for group, count in Counter(case.group for case in cases).items())
    calls, seconds = sum(reference.counts.values()), time.monotonic() - begun
    print(f"{name:18}{calls:5d} calls{len(cases):5d} runs{bad:4d} bad{seconds:7.1f} s  {kinds}", flush=True)


def describe(result: Result) -> str:
    """A case with problems, for people."""
    problems = (f"    {problem}" for problem in result.problems[:6])
    stderr = (f"    | {line}" for line in result.err.splitlines()[-12:])
    return "\n".join([f"{result.case}  [{result.hit}] exit {result.code}", *problems, *stderr])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operation", nargs="*", default=[operation.name for operation in OPERATIONS])
    parser.add_argument("--most", type=int, default=MOST, help="runs of a group and operation")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--shards", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--report", type=Path, help="write all results (jsonl)")
    options = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pic-faults-", dir=memory) as base:
        if VARIABLE not in os.environ:
            library = build(Path(base))
            code = os.spawnve(
                os.P_WAIT, sys.executable, [sys.executable, "-P", "-m", "faults", *sys.argv[1:]], environment(library)
            )
            sys.exit(code)
        sys.exit(_main(Path(base), options))


def _main(base: Path, options: argparse.Namespace) -> int:
    begun = time.monotonic()
    named = {*options.operation, *(beside for first, beside in PAIRS if first in options.operation)}
    harness = Harness(base, [operation for operation in OPERATIONS if operation.name in named])
    print(f"ready after {time.monotonic() - begun:.1f} s", flush=True)
    names = sorted(options.operation, key=lambda name: not harness.operations[name].is_slow)
    results = in_shards(harness, names, options)
    if options.report:
        options.report.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    bad = [result for result in results if result.problems]
    groups = Counter(result.group for result in results)
    for result in bad:  # once more, where the end of a long log is all that is kept
        print(describe(result))
    print(f"\n{len(results)} runs ({', '.join(f'{count} {group}' for group, count in groups.items())}), "
          f"{len(bad)} with problems, {time.monotonic() - begun:.0f} s")  # fmt: skip
    return int(bool(bad))


if __name__ == "__main__":
    main()
