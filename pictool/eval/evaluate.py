"""`evaluate()`: cases → groups → header → results file → missing results. It can be killed, and continues.

from pictool import Store, load_model
from pictool.eval.datasets import open_dataset
from pictool.eval.evaluate import evaluate
from pictool.eval.policies import parse_policies
from pictool.eval.summary import summarise

dataset = open_dataset("questions.jsonl", {})
done = evaluate(load_model(), Store(), dataset, parse_policies(["naive", "legolink-16"]))
for line in summarise(done).lines:
    print(line.label, line.score.mean)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.errors import InputError
from pictool.eval import EXTRA
from pictool.eval.cases import CaseGroup, SpecOptions, group_cases
from pictool.eval.datasets.base import Dataset
from pictool.eval.policies import FULL
from pictool.eval.results import CaseResult, ResultsFile, ResultsHeader, make_header, open_results
from pictool.eval.runner import Runner, object_store, second_fingerprint
from pictool.linker.grid import LabelledPolicy
from pictool.needs import require_extra
from pictool.store.directory import make_within
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class EvaluationOptions:
    """How an evaluation is carried out; none of it changes a number.

    Fields:
        output: the results file; None: one in the store, named by what the experiment is.
        limit: only the first cases.
    """

    output: Path | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit {self.limit}: must be 1 or more")


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
    require_extra(*EXTRA)
    cases = list(dataset.cases())
    grouped = group_cases(model, islice(cases, run.limit), options)
    if not grouped.groups:
        raise InputError(f"{dataset.name}: none of the {len(grouped.skipped)} cases fits {model.name}")
    header = make_header(model, dataset, cases, options)
    path = run.output or make_within(store.root, "eval", "results") / f"{header.digest[:12]}.jsonl"
    with open_results(path, header, on_note) as file, _torch_threads(file.header.threads):
        if not file.header.is_of_machine(header):
            on_note(f"{path}: was started on another machine; its times are from both")
        _require_same_models(model, file, policies)
        runner = Runner(model, object_store(store, model, file.header.threads), policies, options.codec)
        left = [
            (group, labels) for group in grouped.groups if (labels := missing_labels(group, policies, file.results))
        ]
        total = len(policies) * sum(len(group.cases) for group in grouped.groups)
        done = total - sum(len(some) for _, labels in left for some in labels.values())
        on_progress(done, total)
        for group, labels in left:
            results = runner.run(group, labels)
            file.append(results)
            done += len(results)
            on_progress(done, total)
        ids = tuple(tuple(case.id for case in group.cases) for group in grouped.groups)
        keys = ((id_, labelled.label) for group in ids for id_ in group for labelled in policies)
        found = tuple(file.results[key] for key in keys)
        return Evaluation(path, file.header, tuple(policies), ids, found, grouped.skipped)


def missing_labels(
    group: CaseGroup, policies: Sequence[LabelledPolicy], done: Container[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    """By case the labels of the policies that are still to answer it; `done` are the ids and labels of results."""
    labels = {
        case.id: tuple(labelled.label for labelled in policies if (case.id, labelled.label) not in done)
        for case in group.cases
    }
    return {case_id: some for case_id, some in labels.items() if some}


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Compute with so many threads: they decide the last bits, so a file is continued with as many."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_same_models(model: Model, file: ResultsFile, policies: Sequence[LabelledPolicy]) -> None:
    """A model that a policy's field names may have been replaced since its results were made."""
    named = {each.label: fingerprint for each in policies if (fingerprint := second_fingerprint(model, each.policy))}
    for result in file.results.values():
        if result.label in named and result.other_model != named[result.label]:
            raise InputError(
                f"{file.path}: its rows of {result.label} were made with another model at the same path; choose "
                "another file with -o"
            )
