"""`tune()`: from questions to the cheapest policy, or to why there is none."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from transformers import LlamaConfig

from pictool.errors import InputError
from pictool.eval.cases import SpecOptions
from pictool.eval.datasets.base import Case
from pictool.eval.policies import parse_policies
from pictool.eval.results import CaseResult, Times
from pictool.fidelity.divergence import made_up_book
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store
from pictool.tuning.questions import (
    Corpus,
    Questions,
    draw,
    fitting,
    normalised_cross_entropy,
    questions_of_file,
    read_corpus,
)
from pictool.tuning.search import Range, TargetStatus
from pictool.tuning.tune import Sample, TuneOutcome, TuningResult, TuningTarget, conclude, measured, tune

TEXTS = [tiny.TEXT * 2, "Nobody asked why the harbour holds numbers; words stand here in the spring. " * 3]
POLICIES = parse_policies(["naive", "legolink-400"])
SHORT = SpecOptions(max_new_tokens=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return load_model(str(tiny.save_model(directory, LlamaConfig(**tiny.SIZE))), "cpu", "float32")


def cases(count: int, documents: int) -> list[Case]:
    return [Case(str(i), (f"text {i % documents}",), f"what {i}?", ("x",)) for i in range(count)]


def test_units_are_sets_of_documents_or_questions_over_one_set() -> None:
    many, one = draw("q", cases(12, 4), 100), draw("q", cases(12, 1), 100)
    assert (many.num_units, one.num_units) == (4, 12)
    for unit in range(4):
        of_unit = [case.documents for case, number in zip(many.listed, many.units, strict=True) if number == unit]
        assert len(of_unit) == 3 and len(set(of_unit)) == 1
    assert many.cases_of(2) == 6
    assert draw("q", cases(12, 4), 100) == many


def continued(model: Model, texts: list[str], documents: int, limit: int) -> Questions:
    """Six words of a text, which the model is to continue by the next three."""
    draw, cases = random.Random(0), list[Case]()
    for number in range(limit):
        chosen = draw.sample(texts, min(documents, len(texts)))
        words = chosen[0].split()
        start = draw.randrange(len(words) - 8)
        cue, gold = (" ".join(words[start + a : start + b]) for a, b in ((0, 6), (6, 9)))
        cases.append(Case(str(number), tuple(chosen), cue, (gold,), query_template="{query}", max_new_tokens=16))
    return Questions("continuations of passages", tuple(cases), tuple(range(limit)))


def test_questions_of_a_file_may_have_answers_and_documents(tmp_path: Path, model: Model) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"query": "Who?"}\n{"query": "Where?", "answers": ["here"]}\n')
    given = questions_of_file(str(path), corpus(TEXTS), 10)
    assert {case.query: case.answers for case in given.listed} == {"Who?": (), "Where?": ("here",)}
    assert given.num_units == 2 and not given.has_answers
    with pytest.raises(InputError):
        questions_of_file(str(path), corpus([]), 10)
    path.write_text(json.dumps({"documents": [{"text": "a b"}], "query": "Who?", "answers": ["b"]}))
    with pytest.raises(InputError):
        questions_of_file(str(path), corpus(TEXTS), 10)


def corpus(texts: list[str], per_prompt: int = 8, room: int = 10_000) -> Corpus:
    return Corpus(tuple(texts), tuple(f"{i}.txt" for i in range(len(texts))), (100,) * len(texts), per_prompt, room)


PAGES = [f"Page {i} is about the town of Name{i}, which lies on a river." for i in range(500)]


def test_a_question_is_asked_over_its_own_documents(tmp_path: Path) -> None:
    """Of 500 pages a prompt has the best that fit, or the files that the record names."""
    path = tmp_path / "q.jsonl"
    path.write_text('{"query": "Where is Name7?"}\n{"query": "And Name9?", "files": ["3.txt", "9.txt"]}\n')
    by_query = {case.query: case.documents for case in questions_of_file(str(path), corpus(PAGES), 10).listed}
    retrieved = by_query["Where is Name7?"]
    assert retrieved[0] == PAGES[7] and len(retrieved) == 8 and by_query["And Name9?"] == (PAGES[3], PAGES[9])
    small = questions_of_file(str(path), corpus(PAGES, room=250), 1)
    assert all(len(case.documents) == 2 for case in small.listed)
    with pytest.raises(InputError, match=r"q\.jsonl: line 1: "):
        questions_of_file(str(path), corpus(PAGES, room=50), 10)
    path.write_text('{"query": "Where?", "files": ["no.txt"]}')
    with pytest.raises(InputError, match=r"line 1: files .*no\.txt"):
        questions_of_file(str(path), corpus(PAGES), 10)


def test_files_of_a_record_are_relative_to_its_file_and_pieces_belong_to_their_file(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(tiny.TEXT)
    (tmp_path / "b.txt").write_text(TEXTS[1])
    (tmp_path / "q.jsonl").write_text('{"query": "Who?", "files": ["b.txt"]}')
    documents = read_corpus(model, [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], 16, 8)
    (case,) = questions_of_file(str(tmp_path / "q.jsonl"), documents, 10).listed
    assert len(case.documents) > 1 and "".join(case.documents) == TEXTS[1]


def test_questions_that_do_not_fit_the_model_may_be_left_out(model: Model) -> None:
    long = Case("long", ("words stand here " * 2000,), "what?", ("x",))
    made = draw("q", [*cases(4, 4), long], 10)
    kept, num_skipped = fitting(model, made, SpecOptions())
    assert num_skipped == 1 and kept.num_units == 4 and sorted(kept.units) == [0, 1, 2, 3]


def test_a_random_model_knows_no_language_and_the_embedded_one_its_own() -> None:
    texts = made_up_book(7)[0]
    embedded = load_model("embedded", "cpu")
    assert normalised_cross_entropy(embedded, texts) < 0.6
    assert (
        normalised_cross_entropy(embedded, ["Lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod."])
        > 0.8
    )


def test_of_a_random_model_kl_can_be_claimed_and_answers_cannot(store: Store, model: Model) -> None:
    made = continued(model, TEXTS, 2, 40)
    exact = tune(model, store, made, POLICIES, TuningTarget("answer_kl", 0.5), options=SHORT)
    assert "does not know the language" in exact.no_answers
    status = {line.label: line.finding.status for line in exact.lines}
    assert exact.chosen == "naive", status
    loss = tune(model, store, made, POLICIES, TuningTarget("loss", 0.01), options=SHORT)
    assert (loss.outcome, loss.chosen) == (TuneOutcome.NO_CLAIM, None)


def test_rounds_grow_until_it_is_clear_and_a_second_run_measures_nothing(store: Store, model: Model) -> None:
    rounds: list[TuningResult] = []
    made = continued(model, TEXTS, 2, 200)
    tuned = tune(model, store, made, POLICIES, TuningTarget("answer_kl", 0.5), options=SHORT, on_round=rounds.append)
    assert [each.units for each in rounds] == [32 * 2**i for i in range(len(rounds))] and tuned.units < 200
    progress: list[tuple[int, int]] = []
    again = tune(
        model, store, made, POLICIES, TuningTarget("answer_kl", 0.5), options=SHORT,
        on_progress=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    assert again == tuned and all(done == total for done, total in progress)


def test_too_few_questions_are_said_to_be_too_few(store: Store, model: Model) -> None:
    tuned = tune(model, store, continued(model, TEXTS, 2, 20), POLICIES, TuningTarget("answer_kl", 0.05), options=SHORT)
    assert (tuned.outcome, tuned.chosen) == (TuneOutcome.UNCLEAR, None)


def test_where_every_policy_fails_full_is_chosen(store: Store, model: Model) -> None:
    made = continued(model, TEXTS, 2, 64)
    tuned = tune(model, store, made, parse_policies(["naive"]), TuningTarget("answer_kl", 1e-6), options=SHORT)
    assert (tuned.outcome, tuned.chosen) == (TuneOutcome.ONLY_FULL, "full")


def test_answers_of_full_are_what_is_lost_where_no_right_ones_are_known(store: Store, model: Model) -> None:
    made = continued(model, TEXTS, 2, 32)
    unknown = replace(made, listed=tuple(replace(case, answers=()) for case in made.listed))
    tuned = tune(model, store, unknown, POLICIES, TuningTarget("answer_kl", 0.05), options=SHORT)
    exact = next(line for line in tuned.lines if line.label == "legolink-400")
    assert (exact.loss, exact.same_answer, tuned.full_score) == (0.0, 1.0, None)


def test_answers_that_differ_are_a_target_and_layers_that_are_computed_whole_count_as_rows(
    model: Model, store: Store
) -> None:
    policies = parse_policies(["cacheblend:ratio=.1", "legolink-400"])
    tuned = tune(
        model, store, continued(model, TEXTS, 2, 4), policies, TuningTarget("differ", 0.5), options=SHORT
    )  # fmt: skip
    blend, exact = sorted(tuned.lines, key=lambda line: line.rows)
    assert exact.rows > 0.99 and (exact.finding.mean, tuned.range) == (0.0, Range(0, 1))
    assert blend.rows > 2 / model.geometry.layers > 0.1  # the layers 0 and 1


# Shares of naive's KL


SHARE = TuningTarget("share", 0.15)


def sample_of(naive: Sequence[float], own: Sequence[float]) -> Sample:
    """What was measured if the answers of the yardstick and of a policy are so many nats from full's."""
    count = len(naive)
    sample = Sample(draw("q", cases(count, 1), count))
    for label, values in {"full": [0.0] * count, "naive@none": naive, "own": own}.items():
        sample.results[label] = [
            CaseResult(
                str(i), label, "x", label, {}, None, "f1", {"f1": 1.0}, "x", 0.0, kl, 1.0, 1, 1, 20, 16, 4.0, 0,
                Times(0.4, 0.1, 0.1, 0.2, 0.5), None,
            )
            for i, kl in enumerate(values)
        ]  # fmt: skip
    return sample


def status_of(naive: Sequence[float], own: Sequence[float]) -> TargetStatus:
    tuned = conclude(sample_of(naive, own), [["naive@none"], ["own"]], SHARE, len(naive), "")
    return {line.label: line.finding.status for line in tuned.lines}["own"]


def test_a_share_is_one_of_sums_within_its_range() -> None:
    draw = np.random.default_rng(0)
    naive, own = draw.lognormal(0, 1, 100), draw.lognormal(-3, 1, 100)
    each, bounds = measured(sample_of(naive.tolist(), own.tolist()), SHARE, ["naive@none", "own"])
    assert np.mean(each["own"]) == pytest.approx(own.sum() / naive.sum())
    assert np.mean(each["naive@none"]) == pytest.approx(1)
    assert bounds.low < SHARE.limit < np.mean(each["own"]) + 1 and bounds.high > max(each["own"]) > bounds.low


def test_what_leaves_little_of_naive_is_certified_and_what_leaves_more_is_not() -> None:
    naive = np.random.default_rng(0).lognormal(0, 1, 256)
    assert status_of(naive.tolist(), (naive / 20).tolist()) is TargetStatus.MEETS
    assert status_of(naive.tolist(), (naive / 2).tolist()) is TargetStatus.FAILS
    assert status_of(naive.tolist()[:20], [0.0] * 20) is TargetStatus.OPEN
    assert status_of([0.0] * 256, [0.0] * 256) is TargetStatus.OPEN, "nothing is left of nothing"


def test_few_samples_of_a_policy_that_leaves_more_than_the_share_certify_it() -> None:
    draw = np.random.default_rng(0)
    wrong = [status_of([1.0] * 128, (1.5 * (draw.random(128) < 0.12)).tolist()) for _ in range(100)]  # leaves 0.18
    assert wrong.count(TargetStatus.MEETS) <= 10


def test_naive_is_measured_beside_the_policies_that_a_share_compares_with_it(store: Store, model: Model) -> None:
    tuned = tune(model, store, continued(model, TEXTS, 2, 40), parse_policies(["legolink-400"]), SHARE, options=SHORT)
    exact, naive = (
        next(line for line in tuned.lines if line.label == label) for label in ("legolink-400", "naive@none")
    )
    assert naive.finding.mean == pytest.approx(1) and exact.finding.mean == pytest.approx(0, abs=1e-3)
    assert naive.finding.units == exact.finding.units == tuned.units
