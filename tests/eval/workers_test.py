"""Processes: the same rows as in one, and none is left behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from eval.shared import CASES, case, model, model_directory, numbers, run

from pictool.errors import InputError, PicError
from pictool.eval.cases import SpecOptions, group_cases
from pictool.eval.policies import parse_policies
from pictool.eval.runner import GroupTask
from pictool.eval.workers import WorkerConfig, make_config, run_in_processes
from pictool.runtime.model import wrap_model
from pictool.store.store import Store

ROOT = Path(__file__).parents[2]


def job_of(store: Store, specs: list[str]) -> WorkerConfig:
    return make_config(model(), store, parse_policies(specs), 1)


def tasks_of(*cases: Any, labels: tuple[str, ...]) -> list[GroupTask]:
    groups = group_cases(model(), cases, SpecOptions()).groups
    return [GroupTask(group, {prepared.id: labels for prepared in group.cases}) for group in groups]


def children() -> list[psutil.Process]:
    return [
        process for process in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(process.cmdline())
    ]


def test_two_processes_give_what_one_gives_and_import_nothing_from_the_working_directory(store: Store) -> None:
    for name in ("socket", "struct", "tempfile", "numpy", "pictool"):
        Path(f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\nraise SystemExit(3)\n")
    specs, options = ["naive", "cacheblend-30", "legolink-2"], SpecOptions(codec="int4")
    two = run(store, specs, options=options, jobs=2, output=Path("two.jsonl"))
    one = run(store, specs, options=options, jobs=1, output=Path("one.jsonl"))
    assert numbers(two) == numbers(one) and len(two.results) == 4 * len(CASES)
    assert two.header.threads == 1 and not children() and not Path("ran").exists()


def test_an_error_in_a_process_is_raised_here(store: Store) -> None:
    job, tasks = job_of(store, ["cacheblend:layers=9"]), tasks_of(case("1"), labels=("cacheblend-15:layers=9",))
    with pytest.raises(PicError, match="cacheblend: layers=9"):
        list(run_in_processes(job, tasks, 1))
    job, tasks = job_of(store, ["naive"]), tasks_of(case("1"), labels=("unknown",))
    with pytest.raises(KeyError) as caught:
        list(run_in_processes(job, tasks, 1))
    assert "runner.py" in str(caught.value.__cause__) and not children()


def test_a_process_that_is_killed_is_told(store: Store) -> None:
    job, tasks = job_of(store, ["naive"]), tasks_of(case("1"), case("2", ["Other.\n"]), labels=("naive",))
    rows = run_in_processes(job, tasks, 1)
    next(rows)
    children()[0].kill()
    with pytest.raises(PicError, match="fewer --jobs"):
        list(rows)
    assert not children()


def test_a_model_that_was_replaced_is_refused(store: Store) -> None:
    job = WorkerConfig(**{**vars(job_of(store, ["naive"])), "directory": model_directory(7)})
    with pytest.raises(InputError, match="was replaced while it was being evaluated"):
        job.runner()


def test_a_model_in_memory_has_one_process(store: Store) -> None:
    opened = model()
    with pytest.raises(InputError, match="is in memory, and other processes cannot open it; use one job"):
        make_config(wrap_model(opened.module, opened.tokenizer), store, parse_policies([]), 1)


SCRIPT = """
import sys
from pathlib import Path
from eval import shared
from pictool.commands.console.errors import reports_errors
from pictool.store.store import Store
shared.model_directory = lambda seed=0: Path(sys.argv[1])
cases = tuple(shared.case(str(i), [f"Page {i}. " * 30], max_new_tokens=8) for i in range(2000))
if __name__ == "__main__":
    reports_errors(lambda: shared.run(Store("store"), ["naive"], dataset=shared.CaseList(cases), jobs=2))()
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_when_it_is_stopped_its_processes_end_and_what_was_done_stays(sent: int, code: int) -> None:
    """The whole group gets the signal of a terminal's Ctrl-C; SIGKILL is the parent's alone."""
    Path("script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    process = subprocess.Popen(
        [sys.executable, "script.py", str(model_directory())], env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what is in the background ignores it
    )  # fmt: skip
    assert process.stderr is not None
    begun = wait_for(
        lambda: process.poll() is not None or any(map(has_rows, Path().glob("store/eval/results/*.jsonl"))), 240
    )
    if not begun:
        os.killpg(process.pid, signal.SIGKILL)
    assert begun and process.poll() is None, process.communicate()
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.kill()
    assert process.wait(120) == code
    assert wait_for(lambda: not any(map(is_alive, started)))
    said = process.stderr.read()
    assert said == "pic: interrupted\n" if sent == signal.SIGINT else "Traceback" not in said
    (results,) = Path("store/eval/results").iterdir()
    assert results.read_text().count("\n") > 1


def has_rows(results: Path) -> bool:
    return results.read_bytes().count(b"\n") > 1


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())
