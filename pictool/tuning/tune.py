"""`tune()`: the cheapest policy that is shown to meet a target, by growing rounds of questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pictool.eval.cases import SpecOptions
from pictool.eval.datasets.base import Case
from pictool.eval.evaluate import Evaluation, EvaluationOptions, evaluate
from pictool.eval.metrics import METRICS
from pictool.eval.policies import FULL
from pictool.eval.results import CaseResult
from pictool.fidelity.divergence import YARDSTICK
from pictool.linker.grid import LabelledPolicy
from pictool.store.store import Store
from pictool.tuning.bounds import Values, lower_bound
from pictool.tuning.questions import Questions, normalised_cross_entropy
from pictool.tuning.search import LEVEL, Finding, Range, TargetStatus, cheapest, judge, make_chains, worth_measuring

if TYPE_CHECKING:
    from pictool.runtime.model import Model

DEFAULT_POLICIES = ("naive", "legolink:k=16,64", "cacheblend:ratio=.15,.3", "prophet:ratio=.05,.1,.2")
FIRST_ROUND = 32  # units; each further round has twice as many
MIN_SCORE = 0.1  # of full's answers, for a claim on answers
MAX_SURPRISE = 0.8  # of log V a token: a model that knows less of the documents' language makes no answers
CLIP = 1.0  # nats: an answer that is farther from full's is as bad as one can be
SHARE_CLIP = 2.0  # nats: the same for an answer that is so much farther than the target's share of blind reuse's
Measure = Literal["share", "answer_kl", "differ", "loss"]


@dataclass(frozen=True)
class TuningTarget:
    """What the mean must be at most.

    KL(full ‖ policy) of the whole answer of full, as a share of blind reuse's (`share`), or in nats (`answer_kl`); the
    share of answers that are not full's very text (`differ`); or the loss of answers. A certificate counts a KL above
    `CLIP` as `CLIP`, so that no assumption on its highest value is needed; what was measured, unclipped, must be at
    most the limit too.

    A share is that of sums: the mean of KL - limit · that of blind reuse is at most 0 (`measured`).

    The loss of a question is full's score less the policy's, by the question's metric; where no right answer is known,
    what is missing from full's own answer (1 - F1).
    """

    measure: Measure
    limit: float

    def range(self, has_answers: bool) -> Range:
        """The values that a question can have, of other measures than a share; a KL is clipped."""
        if self.measure == "answer_kl":
            return Range(0.0, max(CLIP, 2 * self.limit))
        return Range(-1.0 if self.measure == "loss" and has_answers else 0.0, 1.0)


class TuneOutcome(StrEnum):
    """What came of it: a policy meets the target; only `full` does; too few questions to say; no claim is possible."""

    FOUND = "found"
    ONLY_FULL = "only full"
    UNCLEAR = "unclear"
    NO_CLAIM = "no claim"


@dataclass(frozen=True)
class TuneLine:
    """One policy. Fields are the keys of the JSON.

    Fields:
        finding: of the target's measure. answer_kl, kl, loss: means. rows: share of context rows a layer (a layer at
            which all are computed, as cacheblend's first ones, counts whole). ttft_s: median.
        speedup: median of full's TTFT ÷ this one's. same_answer: share of answers that are full's very text.
    """

    label: str
    algo: str
    finding: Finding
    answer_kl: float
    kl: float
    loss: float
    rows: float
    ttft_s: float
    speedup: float
    same_answer: float


@dataclass(frozen=True)
class TuningResult:
    """What is known after a round. Fields are the keys of the JSON.

    Fields:
        level: the chance of a wrong claim.
        questions: what they are. units: that were measured; available: of all.
        range: the values that a question can have; a KL that is clipped.
        full_score: None where no right answers are known.
        no_answers: why nothing can be said of answers; empty if it can.
        chosen: the label of the policy that is certified and chosen; None: none is. by_mean: the one that would be if
            the means of these questions were those of all.
    """

    target: TuningTarget
    level: float
    questions: str
    units: int
    available: int
    range: Range
    full_score: float | None
    full_ttft_s: float
    no_answers: str
    outcome: TuneOutcome
    chosen: str | None
    by_mean: str | None
    lines: Sequence[TuneLine]
    results: str

    def report(self) -> dict[str, Any]:
        """The JSON of `pic tune --json`."""
        return asdict(self)


class Sample:
    """What was measured so far: by label the results of a growing number of questions."""

    def __init__(self, questions: Questions) -> None:
        self.questions = questions
        self.results: dict[str, list[CaseResult]] = {}
        self.path = ""

    def take(self, done: Evaluation) -> None:
        """Add an evaluation of the first questions, of some of the policies."""
        by_label: dict[str, list[CaseResult]] = {labelled.label: [] for labelled in done.policies}
        for result in done.results:
            by_label[result.label].append(result)
        self.results |= by_label
        self.path = str(done.path)

    def values(self, label: str, measure: Measure) -> list[float]:
        """A measure of every question that was measured."""
        measured = zip(self.questions.listed, self.results[label], self.results[FULL.label], strict=False)
        return [value_of(measure, *each) for each in measured]

    def units(self, values: Sequence[float]) -> Values:
        """The mean of every unit, of values of the first questions."""
        of_unit: dict[int, list[float]] = {}
        for unit, value in zip(self.questions.units, values, strict=False):
            of_unit.setdefault(unit, []).append(value)
        return np.array([fmean(unit) for unit in of_unit.values()])


def value_of(measure: Measure, case: Case, result: CaseResult, full: CaseResult) -> float:
    """The measure of one question, see `TuningTarget`."""
    if measure in ("answer_kl", "share"):
        assert result.answer_kl is not None, "all questions are verified"
        return result.answer_kl
    if measure == "differ":
        return float(result.answer != full.answer)
    if case.answers:
        return full.scores[full.metric] - result.scores[result.metric]
    return 1 - METRICS["f1"](result.answer, [full.answer])


def measured(sample: Sample, target: TuningTarget, labels: Sequence[str]) -> tuple[dict[str, list[float]], Range]:
    """Of each label the target's measure of every question, and the range that these are clipped to.

    Of a share: limit + (KL - limit · `YARDSTICK`'s) ÷ the mean of the latter in the sample. The mean of these is the
    share, of sums. It is at most the limit where the mean of the differences is at most 0, whatever that mean is. A
    difference is clipped to `SHARE_CLIP` above, and to -limit · `SHARE_CLIP` below, which only makes the claim harder.
    """
    each = {label: sample.values(label, target.measure) for label in labels}
    if target.measure != "share":
        return each, target.range(sample.questions.has_answers)
    naive, limit = sample.values(YARDSTICK.label, target.measure), target.limit
    mean = max(float(sample.units(naive).mean()), 1e-9)
    shares = {
        label: [limit + (kl - limit * of_naive) / mean for kl, of_naive in zip(values, naive, strict=False)]
        for label, values in each.items()
    }
    return shares, Range(limit * (1 - SHARE_CLIP / mean), limit + SHARE_CLIP / mean)


def tune(
    model: Model, store: Store, questions: Questions, policies: Sequence[LabelledPolicy], target: TuningTarget,
    options: SpecOptions = SpecOptions(), *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda text: None,
    on_round: Callable[[TuningResult], None] = lambda tuned: None,
) -> TuningResult:  # fmt: skip
    """Measure policies against `full` on more and more questions, until the cheapest that meets the target is clear.

    What was measured is in a results file of `pic eval`, so the same call goes on where one was stopped.

    Args:
        policies: `full` first, see `parse_policies`.
        on_round: called with what is known after every round.

    Raises:
        PicError: names the case, the file or the option.
    """
    needed = [FULL]
    if target.measure == "share":
        needed.append(YARDSTICK)
        policies = [*policies, YARDSTICK]
    chains, sample = make_chains(policies), Sample(questions)
    no_language = _no_language(model, questions)
    remaining, units = [label for chain in chains for label in chain], 0
    while True:
        units = next_round(units, questions.num_units)
        run = EvaluationOptions(limit=questions.cases_of(units))
        chosen = [labelled for labelled in policies if labelled in needed or labelled.label in remaining]
        sample.take(evaluate(model, store, questions, chosen, options, run, on_progress=on_progress, on_note=on_note))
        tuned = conclude(sample, chains, target, units, no_language)
        on_round(tuned)
        found = {line.label: line.finding for line in tuned.lines}
        remaining = worth_measuring(chains, found, {line.label: line.rows for line in tuned.lines})
        if not remaining or units == questions.num_units or tuned.outcome is TuneOutcome.NO_CLAIM:
            return tuned


def next_round(units: int, available: int) -> int:
    """How many units are measured after a round of so many."""
    return min(max(FIRST_ROUND, 2 * units), available)


def conclude(
    sample: Sample, chains: Sequence[Sequence[str]], target: TuningTarget, units: int, no_language: str
) -> TuningResult:
    """What a sample says."""
    labels, full = [label for chain in chains for label in chain], sample.results[FULL.label]
    each, bounds = measured(sample, target, labels)
    clipped = {label: sample.units(np.clip(values, bounds.low, bounds.high).tolist()) for label, values in each.items()}
    means = {label: float(sample.units(values).mean()) for label, values in each.items()}
    found = judge(chains, clipped, target.limit, bounds, means=means)
    lines = [_line(sample, label, found[label]) for label in labels]
    costs = {line.label: line.rows for line in lines}
    chosen = cheapest(found, costs)
    by_mean = min((label for label in labels if means[label] <= target.limit), key=costs.__getitem__, default=None)
    no_answers = no_language or _no_score(sample)
    if no_answers and target.measure == "loss":
        outcome, chosen = TuneOutcome.NO_CLAIM, None
    elif chosen is not None:
        outcome = TuneOutcome.FOUND
    elif all(finding.status in (TargetStatus.FAILS, TargetStatus.BLOCKED) for finding in found.values()):
        outcome, chosen = TuneOutcome.ONLY_FULL, FULL.label
    else:
        outcome = TuneOutcome.UNCLEAR
    return TuningResult(
        target, LEVEL, sample.questions.origin, units, sample.questions.num_units, bounds,
        fmean(result.scores[result.metric] for result in full) if sample.questions.has_answers else None,
        median(result.timing.ttft_s for result in full), no_answers, outcome, chosen, by_mean, lines, sample.path,
    )  # fmt: skip


def _line(sample: Sample, label: str, finding: Finding) -> TuneLine:
    results = sample.results[label]
    pairs = list(zip(results, sample.results[FULL.label], strict=False))
    return TuneLine(
        label,
        results[0].algo,
        finding,
        fmean(sample.values(label, "answer_kl")),
        fmean(result.kl or 0.0 for result in results),
        fmean(sample.values(label, "loss")),
        rows=fmean(result.row_share for result in results),
        ttft_s=median(result.timing.ttft_s for result in results),
        speedup=median(exact.timing.ttft_s / result.timing.ttft_s for result, exact in pairs),
        same_answer=fmean(result.answer == exact.answer for result, exact in pairs),
    )


def _no_language(model: Model, questions: Questions) -> str:
    """Why answers of this model mean nothing, whatever the questions; empty if they may."""
    share = normalised_cross_entropy(
        model, list(dict.fromkeys(text for case in questions.listed[:64] for text in case.documents))
    )
    if share < MAX_SURPRISE:
        return ""
    return (
        f"{model.name} does not know the language of these documents: its loss per token is {share:.0%} of that of "
        "a random guess, so its answers mean nothing"
    )


def _no_score(sample: Sample) -> str:
    """Why too few answers of full are right for a claim on answers; empty if enough are."""
    if not sample.questions.has_answers:
        return ""
    scores = sample.units([result.scores[result.metric] for result in sample.results[FULL.label]])
    if lower_bound(scores, LEVEL, 0.0, 1.0) > MIN_SCORE:
        return ""
    return f"full recompute itself scores {scores.mean():.2f} on these questions, so it has no right answers to lose"
