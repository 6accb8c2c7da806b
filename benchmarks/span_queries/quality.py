"""What reuse costs in answers: queries over the embedded world under some policies, each against full recompute."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pictool.engines.base import Answer, Engine, first_token_kl
from pictool.eval.datasets.base import Case
from pictool.eval.metrics import METRICS
from pictool.linker.grid import LabelledPolicy
from pictool.spans.execute import Executor
from pictool.spans.query import Path, Query
from pictool.spans.running import Hooks, RunOptions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Quality:
    """Answers under one policy. Fields are the keys of the JSON.

    Fields:
        right: share of cases whose answer is right. kl_mean, kl_median: KL(full ‖ it) of the first token of the last
            call, in nats.
    """

    label: str
    cases: int
    right: float
    kl_mean: float
    kl_median: float


def measure_quality(
    engine: Engine,
    policies: Sequence[LabelledPolicy],
    cases: Sequence[Case],
    make_query: Callable[[Case], Query],
    on_run: Callable[[], None],
    options: RunOptions = RunOptions(),
) -> list[Quality]:
    """Answer every case under every policy, of which `full` is the first; what inner calls draw is the same for all.

    Under a policy that reuses objects inner outputs are linked as they were generated.
    """
    logits: dict[str, list[Tensor]] = {labelled.label: [] for labelled in policies}
    right: dict[str, list[float]] = {labelled.label: [] for labelled in policies}
    for case in cases:
        query = make_query(case)
        for labelled in policies:
            answer = last_answer(engine, query, replace(options, policy=labelled.policy))
            logits[labelled.label].append(answer.logits.clone())
            right[labelled.label].append(METRICS[case.metric](answer.text.partition("\n")[0], case.answers))
            on_run()
    full = logits[policies[0].label]
    return [_quality(label, full, values, right[label]) for label, values in logits.items()]


def last_answer(engine: Engine, query: Query, options: RunOptions) -> Answer:
    """Run a query whose root is a call; returns the answer of that."""
    answers: dict[Path, Answer] = {}

    def keep(path: Path, answer: Answer) -> None:
        answers.clear()
        answers[path] = answer

    Executor(lambda name: engine, options, Hooks(on_answer=keep)).run(query)
    return answers[()]


def _quality(label: str, full: Sequence[Tensor], own: Sequence[Tensor], right: Sequence[float]) -> Quality:
    kl = [first_token_kl(wanted, got) for wanted, got in zip(full, own, strict=True)]
    return Quality(label, len(right), statistics.fmean(right), statistics.fmean(kl), statistics.median(kl))


def by_label(rows: Sequence[Quality]) -> Mapping[str, Quality]:
    return {row.label: row for row in rows}
