"""One case: a world is made, an operation is disturbed in it, and what is there then is judged."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from faults import judge
from faults.cases import Case
from faults.judge import Known, State
from faults.operations import Operation, command_of, make_model, make_world
from faults.program import Ended, Running, run, warm_up, warm_up_slow
from faults.shim import Action, Fault, Kind, Shim


@dataclass(frozen=True)
class Reference:
    """What an operation does without faults: how it ended, what was there before and after, how often it called what.

    `steady` are the files that two runs wrote alike.
    """

    ended: Ended
    again: Ended
    after: State
    steady: frozenset[str]
    counts: dict[Kind, int]


@dataclass
class Result:
    """What was wrong after a case; `hit` is the call that was acted on."""

    case: str
    group: str
    operation: str
    code: int
    hit: str
    problems: list[str] = field(default_factory=list)
    err: str = ""


class Harness:
    """The world, and what every operation does in it without faults."""

    def __init__(self, base: Path, operations: Sequence[Operation]) -> None:
        self.base = base
        self.model = make_model(base / "model")
        warm_up(self.model, base / "warm")
        if any(operation.is_slow for operation in operations):
            warm_up_slow()
        self.world = base / "made"
        self.operations = {operation.name: operation for operation in operations}
        self.keys = make_world(self.world, self.model, base / "made-output")
        self.before = State.of(self.world)
        self.excused = {name for name in self.before.objects if name.startswith("damaged/")}
        self.known = Known(base / "known")
        self.known.learn(self.world, self.before, self.excused)
        self._references: dict[str, Reference] = {}

    def use(self, place: Path) -> None:
        """Work in a directory of its own, with a shim of its own."""
        place.mkdir()
        self.shim, self.place = Shim(), place
        self.root, self._output = place / "world", place / "output"

    def _reset(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.world, self.root, symlinks=True)

    def _run(self, operation: Operation, fault: Fault | None = None) -> Ended:
        command = command_of(operation, self.root, self.model, self.keys)
        if fault is None:
            return run(command, self.root, self._output)
        return run(command, self.root, self._output, self.shim, fault)

    def reference(self, name: str) -> Reference:
        """What an operation does without faults, run now if it was not yet."""
        if name not in self._references:
            self._references[name] = self._run_without_faults(self.operations[name])
        return self._references[name]

    def _run_without_faults(self, operation: Operation) -> Reference:
        states, ends = [], []
        for _ in range(2):
            self._reset()
            ends.append(self._run(operation, Fault()))
            counts = self.shim.counts
            if ends[-1].code:
                raise SystemExit(f"{operation.name}: fails without a fault: {ends[-1].err}{ends[-1].out}")
            problems = judge.collect(self.root) + judge.damage(self.root, ["damaged"])
            assert not problems, f"{operation.name}: {problems}"
            states.append(State.of(self.root))
        shutil.copytree(self.root / "out", self.place / f"out-{operation.name}")
        again = self._run(operation)
        self.known.learn(self.root, states[1], self.excused)
        if operation.instead:
            self._reset()
            self._run(replace(operation, command=f"{operation.command} {operation.instead}"))
            self.known.learn(self.root, State.of(self.root), self.excused)
        same = {name for name, content in states[0].files.items() if states[1].files.get(name) == content}
        return Reference(ends[1], again, states[1], frozenset(same), counts)

    # One case

    def judge(self, case: Case) -> Result:
        operation = self.operations[case.operation]
        self._reset()
        ended, problems = self._disturb(case)
        problems += self._end_problems(case, ended)
        problems += self._state_problems(operation, "then", State.of(self.root))
        problems += judge.collect(self.root)
        litter = self._litter(case, State.of(self.root))
        problems += [f"litter after gc: {name}" for name in litter if name.split("/")[0] in judge.STORES]
        problems += self._repeat_problems(case, operation)
        err = ended.err[-3000:] if problems else ""
        return Result(str(case), case.group, case.operation, ended.code, self.shim.hit, problems, err)

    def _disturb(self, case: Case) -> tuple[Ended, list[str]]:
        """Run the operation, disturbed; and what was wrong with the run beside it."""
        operation = self.operations[case.operation]
        command = command_of(operation, self.root, self.model, self.keys)
        self.shim.set(self.root, case.fault)
        running = Running(command, self.root, self._output, self.shim)
        problems = []
        if case.beside:
            other = self.operations[case.beside]
            second = command_of(other, self.root, self.model, self.keys)
            beside = Running(second, self.root, self._output.with_name("beside")).wait()
            problems = [f"beside: {problem}" for problem in judge.message_problems(beside.code, beside.out, beside.err)]
            if beside.code:
                problems.append(f"beside: exit code {beside.code}: {beside.err}")
        if case.kill_s is not None:
            time.sleep(case.kill_s)
            running.kill(signal.SIGKILL)
        return running.wait(), problems

    def _end_problems(self, case: Case, ended: Ended) -> list[str]:
        if ended.code < 0:
            signals = {-signal.SIGKILL, -case.fault.number if case.fault.action is Action.SIGNAL else -signal.SIGKILL}
            return [] if ended.code in signals else [f"ended by signal {-ended.code}"]
        if case.fault.action is Action.SIGNAL and ended.code == 130:
            return judge.message_problems(0, ended.out, ended.err)
        problems = judge.message_problems(ended.code, ended.out, ended.err)
        operation, reference = self.operations[case.operation], self.reference(case.operation)
        if ended.code == 0 and not operation.measures and _steady(ended.out) != _steady(reference.ended.out):
            said = operation.reports and _says(case.fault, ended)
            problems += [] if said else [f"another answer: {ended.out!r}, not {reference.ended.out!r}"]
        return problems

    def _state_problems(self, operation: Operation, when: str, state: State) -> list[str]:
        """Objects and outputs that are lost, or not as they should be."""
        after = self.reference(operation.name).after
        removable = self.before.objects.keys() - after.objects.keys() if operation.removes else set()
        lost = self.before.objects.keys() - state.objects.keys() - removable - self.excused
        wrong = [
            name for name, content in state.objects.items()
            if name not in self.excused and not self.known.is_right(self.root, name, content)
        ]  # fmt: skip
        outputs = [name for name in state.files if name.startswith("out/") and name in after.files]
        half = [name for name in outputs if not self._is_whole(operation, name, state)]
        return [
            f"{what} {when}: {name}"
            for what, names in (("lost", lost), ("wrong", wrong), ("half", half))
            for name in names
        ]

    def _is_whole(self, operation: Operation, name: str, state: State) -> bool:
        reference = self.reference(operation.name)
        if name.endswith(".kvo"):
            return judge.is_same(self.root / name, self.place / f"out-{operation.name}" / Path(name).name)
        if name in reference.steady:
            return state.files[name] == reference.after.files[name]
        if name.endswith(".json"):
            return isinstance(json.loads((self.root / name).read_text()), dict)
        return True

    def _litter(self, case: Case, state: State) -> list[str]:
        afters = (self.reference(name).after for name in (case.operation, case.beside) if name)
        return state.litter(self.before, *afters)

    def _repeat_problems(self, case: Case, operation: Operation) -> list[str]:
        """Run the operation again, now without a fault."""
        reference, ended = self.reference(operation.name), self._run(operation)
        problems = [f"again: {problem}" for problem in judge.message_problems(ended.code, ended.out, ended.err)]
        right = {_steady(reference.ended.out), _steady(reference.again.out)}
        if ended.code and not (operation.removes and reference.again.code):
            problems.append(f"again: exit code {ended.code}: {ended.err}")
        elif not ended.code and not operation.measures and _steady(ended.out) not in right:
            problems.append(f"again: another answer: {ended.out!r}, not {reference.ended.out!r}")
        problems += judge.collect(self.root)
        state = State.of(self.root)
        problems += self._state_problems(operation, "again", state)
        missing = reference.after.objects.keys() - state.objects.keys() - self.excused
        problems += [] if operation.removes or operation.resumes else [f"not made again: {name}" for name in missing]
        return problems + [f"litter: {name}" for name in self._litter(case, state)]


def _steady(text: str) -> str:
    """An output without what may differ: whether an object was there, and how long ago it was used."""
    return re.sub(r"\b(new|cached)\b|  +(now|\d+[smhdy])\b", "", text)


def _says(fault: Fault, ended: Ended) -> bool:
    """Whether it says what it could not read; sqlite has words of its own for that."""
    reasons = (os.strerror(fault.number), "unable to open", "disk I/O error")
    return fault.action in (Action.FAIL, Action.FAIL_ON) and any(why in ended.out + ended.err for why in reasons)
