"""`evaluate()`: cases → groups → header → results file → missing tasks → results. It can be killed, and continues.

from pictool import Store, load_model
from pictool.eval.datasets import open_dataset
from pictool.eval.evaluate import evaluate
from pictool.eval.policies import parse_policies
from pictool.eval.summary import summarise

dataset = open_dataset("world", {"prompts": "3"})
done = evaluate(load_model(), Store(), dataset, parse_policies(["naive", "legolink-16"]))
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
from pictool.eval import require_extra
from pictool.eval.cases import CaseGroup, SpecOptions, group_cases
from pictool.eval.datasets.base import Dataset
from pictool.eval.policies import FULL
from pictool.eval.results import CaseResult, ResultsFile, ResultsHeader, make_header, open_results
from pictool.eval.runner import GroupTask, Runner, object_store, second_fingerprint
from pictool.eval.workers import make_config, run_here, run_in_processes
from pictool.linker.grid import LabelledPolicy
from pictool.runtime.machine import usable_cores
from pictool.store.directory import make_within
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

SMALL_MODEL_BYTES = 200_000_000  # 50 M parameters in float32: below, a process per core of one thread beats threads


@dataclass(frozen=True)
class EvaluationOptions:
    """How an evaluation is carried out; none of it changes a number.

    Fields:
        output: the results file; None: one in the store, named by what the experiment is.
        limit: only the first cases.
        jobs: processes; more than one need a `__main__` that can be imported. Each has one thread if there are several,
            or the model is small, else as many as torch takes.
    """

    output: Path | None = None
    limit: int | None = None
    jobs: int = 1

    def __post_init__(self) -> None:
        for option, value in (("--limit", self.limit), ("--jobs", self.jobs)):
            if value is not None and value < 1:
                raise InputError(f"{option} {value}: must be 1 or more")


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: the results of every case under every policy, in order of dataset and tables.

    Fields:
        groups: ids of the cases that share their documents.
        skipped: ids of cases that do not fit the model.
    """

    path: Path
    header: ResultsHeader
    policies: tuple[LabelledPolicy, ...]
    groups: tuple[tuple[str, ...], ...]
    results: tuple[CaseResult, ...]
    skipped: tuple[str, ...]


def evaluate(
    model: Model, store: Store, dataset: Dataset, policies: Sequence[LabelledPolicy],
    options: SpecOptions = SpecOptions(), run: EvaluationOptions = EvaluationOptions(), *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Evaluation:  # fmt: skip
    """Answer every case of a dataset under every policy, and under `full`, with which all are compared.

    What the results file already has is not run again.

    Args:
        store: its directory holds the results and, apart from its own objects, those of evaluations.
        policies: `full` first, see `parse_policies`.
        on_progress: called with how many answers are done, of how many; at the start too.
        on_note: called with what a user should know.

    Raises:
        PicError: names the case, the file or the option; what was done is in the results file.
    """
    assert policies[0] == FULL, "parse_policies puts full first"
    require_extra()
    cases = list(dataset.cases())
    grouped = group_cases(model, islice(cases, run.limit), options)
    if not grouped.groups:
        raise InputError(f"{dataset.name}: none of the {len(grouped.skipped)} cases fits {model.name}")
    header = make_header(model, dataset, cases, options, _threads(model, run.jobs))
    path = run.output or make_within(store.root, "eval", "results") / f"{header.digest[:12]}.jsonl"
    with open_results(path, header, on_note) as file:
        if not file.header.is_of_machine(header):
            on_note(f"{path}: was begun on another machine; its times are of both")
        _require_same_models(model, file, policies)
        tasks = missing_tasks(grouped.groups, policies, file.results)
        total = len(policies) * sum(len(group.cases) for group in grouped.groups)
        done = total - sum(len(labels) for task in tasks for labels in task.labels.values())
        on_progress(done, total)
        with closing(_run(model, store, policies, tasks, file.header, run.jobs)) as batches:
            for results in batches:
                file.append(results)
                done += len(results)
                on_progress(done, total)
        ids = tuple(tuple(case.id for case in group.cases) for group in grouped.groups)
        keys = ((id_, labelled.label) for group in ids for id_ in group for labelled in policies)
        found = tuple(file.results[key] for key in keys)
        return Evaluation(path, file.header, tuple(policies), ids, found, grouped.skipped)


def missing_tasks(
    groups: Sequence[CaseGroup], policies: Sequence[LabelledPolicy], done: Container[tuple[str, str]]
) -> list[GroupTask]:
    """What is still to be answered; `done` are the ids and labels of results."""
    tasks = []
    for group in groups:
        labels = {
            case.id: tuple(labelled.label for labelled in policies if (case.id, labelled.label) not in done)
            for case in group.cases
        }
        missing = {case_id: some for case_id, some in labels.items() if some}
        if missing:
            tasks.append(GroupTask(group, missing))
    return tasks


def default_jobs(model: Model) -> int:
    """A process per core for a small model on a CPU, else one."""
    return _cores() if model.directory is not None and _is_small(model) else 1


def _is_small(model: Model) -> bool:
    """Whether threads would cost it more than they give."""
    from pictool.runtime.checkpoint import weight_files

    if model.device != "cpu":
        return False
    if model.directory is None and model.files:
        sizes = [path.stat().st_size for path in model.files]
    elif model.directory is None:
        sizes = [int(weight.numel() * weight.itemsize) for weight in model.module.parameters()]
    else:
        sizes = [path.stat().st_size for path in weight_files(model.directory)]
    return sum(sizes) < SMALL_MODEL_BYTES


def _run(
    model: Model,
    store: Store,
    policies: Sequence[LabelledPolicy],
    tasks: Sequence[GroupTask],
    header: ResultsHeader,
    jobs: int,
) -> Generator[list[CaseResult], None, None]:
    """Here, or in processes that have together at most as many threads as there are cores."""
    if not tasks:
        return
    threads, codec = header.threads, header.identity["codec"]
    objects = object_store(store, model, threads)
    most = jobs if threads == 1 else max(1, _cores() // threads)
    count = min(jobs, most, len(tasks))
    if count > 1:
        yield from run_in_processes(make_config(model, objects, policies, threads, codec), tasks, count)
    else:
        yield from run_here(Runner(model, objects, policies, codec), tasks, threads)


def _threads(model: Model, jobs: int) -> int:
    """Threads of each process of a new experiment."""
    import torch

    return 1 if jobs > 1 or _is_small(model) else torch.get_num_threads()


def _cores() -> int:
    return usable_cores() or 1


def _require_same_models(model: Model, file: ResultsFile, policies: Sequence[LabelledPolicy]) -> None:
    """A model that a policy's field names may have been replaced since its results were made."""
    named = {each.label: fingerprint for each in policies if (fingerprint := second_fingerprint(model, each.policy))}
    for result in file.results.values():
        if result.label in named and result.other_model != named[result.label]:
            raise InputError(
                f"{file.path}: its rows of {result.label} were made with another model at the same path; name another "
                "file with -o"
            )
