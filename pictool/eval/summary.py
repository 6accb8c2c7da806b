"""From the results of cases to the numbers of a table: a line per policy, compared with `full` case by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from pictool.errors import InputError
from pictool.eval.evaluate import Evaluation
from pictool.eval.metrics import METRICS
from pictool.eval.policies import FULL
from pictool.eval.results import CaseResult, Times
from pictool.eval.statistics import Estimate, clustered_mean
from pictool.linker.grid import LabelledPolicy


@dataclass(frozen=True)
class Line:
    """A policy over all cases. Shares are of 1; times are medians in seconds. Fields are the keys of the JSON.

    Fields:
        score: mean by the metric.
        difference: mean difference to `full`, case by case. lost, won: share of cases that score less and more.
        kl, answer_kl: mean KL(full ‖ this) of the first token, and of all tokens of full's answer, nats.
        same_answer: share of answers whose text is full's.
        agreement, common_prefix, rows, row_share, bytes_read: means.
        speedup: median over cases of full's TTFT ÷ this one's.
        decode_tokens_per_s: all tokens ÷ all seconds.
        peak_bytes: the most that memory rose in a case.
        by_kind: scores. same_by_kind: `same_answer`.
    """

    label: str
    algo: str
    params: Mapping[str, Any]
    score: Estimate
    difference: Estimate
    lost: float
    won: float
    kl: Estimate | None
    answer_kl: Estimate | None
    same_answer: float
    agreement: float
    common_prefix: float
    rows: float
    row_share: float
    timing: Times
    speedup: float
    decode_tokens_per_s: float | None
    peak_bytes: int | None
    bytes_read: float
    by_kind: Mapping[str, Estimate]
    same_by_kind: Mapping[str, float]


SCORES = (0.0, 1.0)  # the bounds of every metric
MEASURED = ("timing", "speedup", "decode_tokens_per_s", "peak_bytes")  # the other fields are the same in every run


@dataclass(frozen=True)
class Summary:
    """The table of an evaluation. Fields are the keys of the JSON.

    Fields:
        title: of the dataset.
        metric: the name of the score's metric, or "score" where cases have several.
        units: groups of cases that share their documents.
        kinds: questions of each kind; empty if there is one kind only.
        tokens: mean of the prompts.
    """

    title: str
    results: str
    header: Mapping[str, Any]
    metric: str
    questions: int
    units: int
    skipped: Sequence[str]
    kinds: Mapping[str, int]
    tokens: float
    lines: Sequence[Line]

    def report(self) -> dict[str, Any]:
        """The JSON of `pic eval --json`."""
        return asdict(self)


def summarise(evaluation: Evaluation, metric: str | None = None) -> Summary:
    """The table of an evaluation.

    Args:
        metric: scores all cases, instead of each one's own; needs no new run.

    Raises:
        InputError: no such metric.
    """
    require_metric(metric)
    group_of = {case_id: number for number, group in enumerate(evaluation.groups) for case_id in group}
    by_label: dict[str, list[CaseResult]] = {labelled.label: [] for labelled in evaluation.policies}
    for result in evaluation.results:
        by_label[result.label].append(result)
    full = {result.id: result for result in by_label[FULL.label]}
    every = by_label[evaluation.policies[-1].label]
    counts = Counter(result.kind for result in every)
    kinds = dict(counts) if len(counts) > 1 else {}
    maker = _LineMaker(full, group_of, metric, list(kinds))
    metrics = {metric or result.metric for result in every}
    return Summary(
        title=evaluation.header.title, results=str(evaluation.path), header=evaluation.header.report(),
        metric=metrics.pop() if len(metrics) == 1 else "score", questions=len(every), units=len(evaluation.groups),
        skipped=evaluation.skipped, kinds=kinds,
        tokens=fmean(result.tokens for result in every),
        lines=[maker.line(labelled, by_label[labelled.label]) for labelled in evaluation.policies],
    )  # fmt: skip


def require_metric(metric: str | None) -> None:
    if metric is not None and metric not in METRICS:
        raise InputError(f"metric {metric!r}: must be one of {', '.join(METRICS)}")


class _LineMaker:
    """Makes lines of results."""

    def __init__(
        self, full: Mapping[str, CaseResult], group_of: Mapping[str, int], metric: str | None, kinds: Sequence[str]
    ) -> None:
        self._full, self._group_of, self._metric, self._kinds = full, group_of, metric, kinds

    def line(self, labelled: LabelledPolicy, results: Sequence[CaseResult]) -> Line:
        scores, groups = [self._score(result) for result in results], [self._group_of[result.id] for result in results]
        pairs = [(result, self._full[result.id]) for result in results]
        differences = [self._score(result) - self._score(full) for result, full in pairs]
        kls = [result.kl for result in results if result.kl is not None]
        whole = [result.answer_kl for result in results if result.answer_kl is not None]
        decode_s = sum(result.timing.decode_s for result in results)
        return Line(
            label=labelled.label, algo=labelled.policy.name, params=results[0].params,
            score=clustered_mean(scores, groups, SCORES),
            difference=_difference(labelled, differences, groups),
            lost=fmean(difference < 0 for difference in differences),
            won=fmean(difference > 0 for difference in differences),
            kl=clustered_mean(kls, groups) if kls else None,
            answer_kl=clustered_mean(whole, groups) if whole else None,
            same_answer=fmean(result.answer == full.answer for result, full in pairs),
            agreement=fmean(result.agreement or 0.0 for result in results),
            common_prefix=fmean(result.common_prefix or 0 for result in results),
            rows=fmean(result.rows for result in results), row_share=fmean(result.row_share for result in results),
            timing=Times(*map(median, zip(*(vars(result.timing).values() for result in results), strict=True))),
            speedup=median(full.timing.ttft_s / result.timing.ttft_s for result, full in pairs),
            decode_tokens_per_s=sum(result.generated for result in results) / decode_s if decode_s else None,
            peak_bytes=max((result.peak_bytes for result in results if result.peak_bytes is not None), default=None),
            bytes_read=fmean(result.bytes_read for result in results),
            by_kind=self._by_kind(results),
            same_by_kind={
                kind: fmean(result.answer == full.answer for result, full in pairs if result.kind == kind)
                for kind in dict.fromkeys(result.kind for result in results)
            },
        )  # fmt: skip

    def _score(self, result: CaseResult) -> float:
        return result.scores[self._metric or result.metric]

    def _by_kind(self, results: Sequence[CaseResult]) -> dict[str, Estimate]:
        """Scores by the kind of question, as far as there are any."""
        chosen = {kind: [result for result in results if result.kind == kind] for kind in self._kinds}
        return {
            kind: clustered_mean(list(map(self._score, some)), [self._group_of[result.id] for result in some], SCORES)
            for kind, some in chosen.items() if some
        }  # fmt: skip


def _difference(labelled: LabelledPolicy, differences: Sequence[float], groups: Sequence[int]) -> Estimate:
    """The mean difference to `full`; that of `full` itself is 0, and no estimate."""
    if labelled == FULL:
        return Estimate(0.0, None, None)
    return clustered_mean(differences, groups, (-1.0, 1.0))
