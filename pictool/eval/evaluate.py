"""`evaluate()`: cases → units → header → results file → what is missing → rows. It can be killed, and continues.

from pictool import Store, load_model
from pictool.eval.contenders import parse_contenders
from pictool.eval.datasets import open_dataset
from pictool.eval.evaluate import evaluate
from pictool.eval.summary import summarise

dataset = open_dataset("world", {"prompts": "3"})
done = evaluate(load_model(), Store(), dataset, parse_contenders(["naive", "legolink-16"]))
for line in summarise(done).lines:
    print(line.label, line.score.mean)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.errors import InputError
from pictool.eval.contenders import FULL, Contender
from pictool.eval.datasets.base import Dataset
from pictool.eval.header import Header, make_header
from pictool.eval.results import Results, open_results
from pictool.eval.row import Row
from pictool.eval.runner import Runner, Task, object_store
from pictool.eval.units import Settings, Unit, Units, make_units
from pictool.eval.workers import make_job, run_here, run_in_processes
from pictool.runtime.machine import usable_cores
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

SMALL_MODEL_BYTES = 200_000_000  # 50 M parameters in float32: below, a process per core of one thread beats threads


@dataclass(frozen=True)
class Run:
    """How an evaluation is carried out; none of it changes a number.

    output: the results file; None: one in the store, named by what the experiment is.
    limit: only the first cases.
    jobs: processes; more than one need a `__main__` that can be imported. Each has one thread if there are several, or
        the model is small, else as many as torch takes.
    skip_long: leave out cases that do not fit the model, instead of refusing them.
    force: begin the results file anew.
    """

    output: Path | None = None
    limit: int | None = None
    jobs: int = 1
    skip_long: bool = False
    force: bool = False


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: rows of every asked case under every contender, in order of dataset and tables."""

    path: Path
    header: Header
    contenders: tuple[Contender, ...]
    units: tuple[tuple[str, ...], ...]  # ids of the cases that share their documents
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]  # ids of cases that do not fit the model


def evaluate(
    model: Model, store: Store, dataset: Dataset, contenders: Sequence[Contender], settings: Settings = Settings(),
    run: Run = Run(), *, on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Evaluation:  # fmt: skip
    """Ask every case of a dataset under every contender, and under `full`, with which all are compared.

    What the results file already has is not run again.

    Args:
        store: its directory holds the results and, apart from its own objects, those of evaluations.
        on_progress: told how many answers are done, of how many; at the start too.
        on_note: told what a user should know.

    Raises:
        PicError: names the case, the file or the option; what was done is in the results file.
    """
    assert contenders[0] == FULL, "parse_contenders puts full first"
    _require_at_least_one("--limit", run.limit)
    _require_at_least_one("--jobs", run.jobs)
    everything = list(dataset.cases())
    chosen = make_units(model, islice(everything, run.limit), settings, run.skip_long)
    if not chosen.units:
        raise InputError(f"{dataset.name}: none of the {len(chosen.skipped)} cases fits {model.name}")
    threads = _threads(model, run.jobs)
    asked = make_header(model, dataset, everything, settings, threads)
    path = run.output or store.root / "eval" / "results" / f"{asked.digest[:12]}.jsonl"
    with open_results(path, asked, run.force, on_note) as results:
        if not results.header.is_of_machine(asked):
            on_note(f"{path}: was begun on another machine; its times are of both")
        _require_same_models(model, results, contenders)
        _fill(results, model, store, contenders, chosen.units, run.jobs, on_progress)
        return _collect(results, contenders, chosen)


def _fill(
    results: Results, model: Model, store: Store, contenders: Sequence[Contender], units: Sequence[Unit], jobs: int,
    on_progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Answer what the results lack; each unit's rows are written as soon as they are there."""
    tasks = missing_tasks(units, contenders, results.rows)
    total = len(contenders) * sum(len(unit.questions) for unit in units)
    done = total - sum(len(labels) for task in tasks for labels in task.wanted.values())
    on_progress(done, total)
    with closing(_run(model, store, contenders, tasks, results.header, jobs)) as finished:
        for rows in finished:
            results.append(rows)
            done += len(rows)
            on_progress(done, total)


def _collect(results: Results, contenders: Sequence[Contender], chosen: Units) -> Evaluation:
    ids = tuple(tuple(question.case.id for question in unit.questions) for unit in chosen.units)
    rows = tuple(results.rows[name, one.label] for unit in ids for name in unit for one in contenders)
    return Evaluation(results.path, results.header, tuple(contenders), ids, rows, chosen.skipped)


def missing_tasks(
    units: Sequence[Unit], contenders: Sequence[Contender], rows: Container[tuple[str, str]]
) -> list[Task]:
    """What is still to be asked."""
    tasks = []
    for unit in units:
        missing = {
            case_id: tuple(one.label for one in contenders if (case_id, one.label) not in rows)
            for case_id in (question.case.id for question in unit.questions)
        }
        wanted = {case_id: labels for case_id, labels in missing.items() if labels}
        if wanted:
            tasks.append(Task(unit, wanted))
    return tasks


def default_jobs(model: Model) -> int:
    """A process per core for a small model on a CPU, else one."""
    return _cores() if model.directory is not None and _is_small(model) else 1


def _is_small(model: Model) -> bool:
    """Whether threads would cost it more than they give."""
    from pictool.runtime.fingerprint import weight_files

    if model.device != "cpu":
        return False
    if model.directory is None:
        sizes = [int(one.numel() * one.itemsize) for one in model.module.parameters()]
    else:
        sizes = [path.stat().st_size for path in weight_files(model.directory)]
    return sum(sizes) < SMALL_MODEL_BYTES


def _run(
    model: Model, store: Store, contenders: Sequence[Contender], tasks: Sequence[Task], header: Header, jobs: int
) -> Generator[list[Row], None, None]:
    """Here, or in processes that have together at most as many threads as there are cores."""
    if not tasks:
        return
    threads, codec = header.threads, header.identity["codec"]
    objects = object_store(store, model, threads)
    most = jobs if threads == 1 else max(1, _cores() // threads)
    count = min(jobs, most, len(tasks))
    if count > 1:
        yield from run_in_processes(make_job(model, objects, contenders, threads, codec), tasks, count)
    else:
        yield from run_here(Runner(model, objects, contenders, codec), tasks, threads)


def _threads(model: Model, jobs: int) -> int:
    """Threads of each process of a new experiment."""
    import torch

    return 1 if jobs > 1 or _is_small(model) else torch.get_num_threads()


def _require_at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"{option} {value}: must be 1 or more")


def _cores() -> int:
    return usable_cores() or 1


def _require_same_models(model: Model, results: Results, contenders: Sequence[Contender]) -> None:
    """A model that a policy's field names may have been replaced since its rows were made."""
    named = {one.label: fingerprint for one in contenders if (fingerprint := one.other_model(model))}
    for row in results.rows.values():
        if row.label in named and row.other_model != named[row.label]:
            raise InputError(
                f"{results.path}: its rows of {row.label} were made with another model at that place; name another "
                "file with -o, or begin it anew with --force"
            )
