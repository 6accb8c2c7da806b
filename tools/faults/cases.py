"""What is tried: at which calls of an operation which faults, kills and signals, drawn by a seed."""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from faults.operations import Operation
from faults.shim import CHANGES, ERRORS, Action, Fault, Kind

_SLOW_SHARE = 6  # of slow operations so much fewer runs are made
# Faults that stay: the disk is full, became read-only or stale, or is gone; no file can be opened any more.
STUCK: dict[str, tuple[frozenset[Kind], int]] = {
    "full": (frozenset({Kind.CREATE, Kind.WRITE, Kind.MKDIR, Kind.SYNC}), errno.ENOSPC),
    "read-only": (frozenset({Kind.CREATE, Kind.RENAME, Kind.LINK, Kind.UNLINK, Kind.MKDIR, Kind.TIMES}), errno.EROFS),
    "stale": (frozenset(Kind), errno.ESTALE),
    "broken": (frozenset(Kind), errno.EIO),
    "no-files": (frozenset({Kind.OPEN, Kind.CREATE, Kind.LIST}), errno.EMFILE),
}
# Two at once: the first has the fault, the second must not notice.
PAIRS = (
    ("compile", "compile"), ("compile-first", "compile-first"), ("compile", "gc"), ("link-missing", "compile"),
    ("prefix-longer", "prefix-longer"), ("link-remote", "link-remote"), ("push", "push"), ("pull", "pull"),
    ("import", "import"), ("compile-output", "compile-output"), ("export", "export"), ("gc", "ls"),
    ("repair", "repair"), ("link-outputs", "link-outputs"), ("converse", "converse"), ("converse", "gc"),
    ("converse-kept", "converse-kept"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run: of an operation under a fault; killed after `kill_s`; or beside another operation."""

    group: str
    operation: str
    fault: Fault = Fault()
    kill_s: float | None = None
    beside: str | None = None

    def __str__(self) -> str:
        what = f"killed after {self.kill_s * 1e3:.0f} ms" if self.kill_s is not None else str(self.fault)
        return f"{self.operation}{f' beside {self.beside}' if self.beside else ''}: {what}"


def cases_of(operation: Operation, counts: Mapping[Kind, int], seconds: float, most: int, seed: int) -> list[Case]:
    """The cases of an operation, drawn evenly over the kinds of calls.

    Args:
        counts: of its calls without a fault, by their kind; `seconds` is how long it runs.
        most: runs under a kill; of the other groups there are twice as many, or fewer.
    """
    draw = random.Random(f"{seed} {operation.name}")
    most = max(4, most // _SLOW_SHARE) if operation.is_slow else most
    name = operation.name
    once = [_at_each_call(kind, counts[kind]) for kind in Kind]
    stuck = [
        [Fault(kinds, Action.FAIL_ON, error, nth) for nth in range(1, sum(counts[kind] for kind in kinds) + 1)]
        for kinds, error in STUCK.values()
    ]
    changes = range(1, sum(counts[kind] for kind in CHANGES) + 1)
    kills = [[Fault(CHANGES, action, 0, nth) for nth in changes] for action in (Action.KILL, Action.KILL_AFTER)]
    calls = range(1, sum(counts.values()) + 1)
    signals = [
        [Fault(frozenset(Kind), Action.SIGNAL, number, nth) for nth in calls]
        for number in (signal.SIGINT, signal.SIGTERM)
    ]
    cases = [Case("fault", name, fault) for fault in _draw(draw, once, 2 * most)]
    cases += [Case("stuck", name, fault) for fault in _draw(draw, stuck, most // 2)]
    cases += [Case("kill", name, fault) for fault in _draw(draw, kills, most)]
    cases += [Case("signal", name, fault) for fault in _draw(draw, signals, most // 3)]
    cases += [Case("timed kill", name, kill_s=draw.uniform(0, seconds)) for _ in range(most // 6)]
    for first, second in PAIRS:
        if first == name:
            cases += [Case("pair", name, fault, beside=second) for fault in _draw(draw, [*kills, *once], most // 3)]
    return cases


def _at_each_call(kind: Kind, count: int) -> list[Fault]:
    """Every fault that a call of this kind may have, at each of them."""
    kinds, calls = frozenset({kind}), range(1, count + 1)
    failures = [Fault(kinds, Action.FAIL, error, nth) for nth in calls for error in ERRORS[kind]]
    is_short = kind in (Kind.READ, Kind.WRITE)
    return failures + [Fault(kinds, Action.SHORT, 0, nth) for nth in calls if is_short]


def _draw(draw: random.Random, groups: Sequence[Sequence[Fault]], most: int) -> Iterator[Fault]:
    """At most so many faults: the small groups whole, of the large ones equal parts; of too many groups, some."""
    groups = [group for group in groups if group]
    drawn = sorted(draw.sample(groups, min(most, len(groups))), key=len)
    for done, group in enumerate(drawn):
        chosen = draw.sample(list(group), min(most // (len(drawn) - done), len(group)))
        yield from chosen
        most -= len(chosen)
