"""From rows to the numbers of a table: a line per algorithm, compared with `full` case by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from pictool.errors import InputError
from pictool.eval.contenders import FULL, Contender
from pictool.eval.evaluate import Evaluation
from pictool.eval.metrics import METRICS
from pictool.eval.reply import Times
from pictool.eval.row import Row
from pictool.eval.statistics import Estimate, clustered_mean


@dataclass(frozen=True)
class Line:
    """An algorithm over all cases. Shares are of 1; times are medians in seconds.

    score: mean by the metric. difference: mean difference to `full`, case by case; lost and won: share of cases that
    score less and more. kl: mean KL(full ‖ this) of the first token, nats. agreement, common_prefix, rows, row_share,
    bytes_read: means. speedup: median over cases of full's TTFT ÷ this one's. decode_tokens_per_s: all tokens ÷ all
    seconds. peak_bytes: the most that memory rose in a case.
    """

    label: str
    algo: str
    params: Mapping[str, Any]
    score: Estimate
    difference: Estimate
    lost: float
    won: float
    kl: Estimate | None
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


MEASURED = ("timing", "speedup", "decode_tokens_per_s", "peak_bytes")  # the other fields are the same in every run


@dataclass(frozen=True)
class Summary:
    """What an evaluation found. `metric` is the name of the score's, or "score" where cases have several."""

    title: str  # of the dataset
    results: str
    header: Mapping[str, Any]
    metric: str
    questions: int
    units: int
    skipped: Sequence[str]
    kinds: Mapping[str, int]  # questions of each; empty if there is one kind only
    tokens: float  # mean of the prompts
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
    unit_of = {name: number for number, unit in enumerate(evaluation.units) for name in unit}
    by_label: dict[str, list[Row]] = {one.label: [] for one in evaluation.contenders}
    for row in evaluation.rows:
        by_label[row.label].append(row)
    full = by_label[FULL.label]
    kinds = Counter(row.kind for row in full)
    maker = _LineMaker(full, [unit_of[row.id] for row in full], metric, list(kinds) if len(kinds) > 1 else [])
    metrics = {metric or row.metric for row in full}
    return Summary(
        title=evaluation.header.title, results=str(evaluation.path), header=evaluation.header.report(),
        metric=metrics.pop() if len(metrics) == 1 else "score", questions=len(full), units=len(evaluation.units),
        skipped=evaluation.skipped, kinds=dict(kinds) if len(kinds) > 1 else {},
        tokens=fmean(row.tokens for row in full),
        lines=[maker.line(one, by_label[one.label]) for one in evaluation.contenders],
    )  # fmt: skip


def require_metric(metric: str | None) -> None:
    if metric is not None and metric not in METRICS:
        raise InputError(f"metric {metric!r}: must be one of {', '.join(METRICS)}")


class _LineMaker:
    """Makes lines of rows that stand in the same order as those of `full`."""

    def __init__(self, full: Sequence[Row], units: Sequence[int], metric: str | None, kinds: Sequence[str]) -> None:
        self._full, self._units, self._metric, self._kinds = full, units, metric, kinds

    def line(self, one: Contender, rows: Sequence[Row]) -> Line:
        assert [row.id for row in rows] == [row.id for row in self._full]
        scores, pairs = [self._score(row) for row in rows], list(zip(rows, self._full, strict=True))
        differences = [self._score(row) - self._score(full) for row, full in pairs]
        kls = [row.kl for row in rows if row.kl is not None]
        return Line(
            label=one.label, algo=one.algo.name, params=rows[0].params,
            score=clustered_mean(scores, self._units),
            difference=clustered_mean(differences, self._units),
            lost=fmean(apart < 0 for apart in differences), won=fmean(apart > 0 for apart in differences),
            kl=clustered_mean(kls, self._units) if kls else None,
            agreement=fmean(row.agreement for row in rows), common_prefix=fmean(row.common_prefix for row in rows),
            rows=fmean(row.rows for row in rows), row_share=fmean(row.row_share for row in rows),
            timing=_medians([row.timing for row in rows]),
            speedup=median(full.timing.ttft_s / row.timing.ttft_s for row, full in pairs),
            decode_tokens_per_s=_rate(rows), peak_bytes=_most(row.peak_bytes for row in rows),
            bytes_read=fmean(row.bytes_read for row in rows),
            by_kind={kind: self._of_kind(rows, scores, kind) for kind in self._kinds},
        )  # fmt: skip

    def _score(self, row: Row) -> float:
        return row.scores[self._metric or row.metric]

    def _of_kind(self, rows: Sequence[Row], scores: Sequence[float], kind: str) -> Estimate:
        chosen = [i for i, row in enumerate(rows) if row.kind == kind]
        return clustered_mean([scores[i] for i in chosen], [self._units[i] for i in chosen])


def _medians(times: Sequence[Times]) -> Times:
    return Times(*(median(column) for column in zip(*(vars(one).values() for one in times), strict=True)))


def _rate(rows: Sequence[Row]) -> float | None:
    seconds = sum(row.timing.decode_s for row in rows)
    return sum(row.generated for row in rows) / seconds if seconds else None


def _most(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
