"""Units of work: the same documents once, every case as it is to be asked, and none that the model cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import subjects
from eval.given import CASES, POSITIONS, A, B, C, case, model

from pictool.errors import InputError
from pictool.eval.units import Settings, make_units

LONG = "harbour " * POSITIONS


def test_consecutive_cases_with_equal_documents_make_a_unit() -> None:
    cases = [case("1"), case("2", [A]), case("3", [A]), case("4", [A, B]), case("5", [A, B])]
    units = make_units(model(), cases, Settings()).units
    assert [[one.case.id for one in unit.questions] for unit in units] == [["1"], ["2", "3"], ["4", "5"]]
    assert [[chunk.text for chunk in unit.chunks] for unit in units] == [[A, B], [A], [A, B]]


def test_a_question_is_asked_as_its_case_says() -> None:
    (first, second), third, _ = (unit.questions for unit in make_units(model(), CASES, Settings()).units)
    assert (first.frame.head, first.frame.tail) == ("<s>", "Question: Who knows one?\nAnswer:")
    assert second.frame.head == "<s>You are."
    assert third[0].frame.tail == " Who knows three?!" and third[0].max_new_tokens == 4


def test_settings_come_before_the_case() -> None:
    settings = Settings(head="Hey.", query_template="Q {query}", max_new_tokens=2, chunk_tokens=5)
    for unit in make_units(model(), CASES, settings).units:
        assert all(1 <= len(chunk) <= 5 for chunk in unit.chunks)
        assert "".join(chunk.text for chunk in unit.chunks) == "".join(unit.questions[0].case.documents)
        for one in unit.questions:
            assert (one.frame.head, one.frame.tail) == ("<s>Hey.", f"Q {one.case.query}")
            assert one.max_new_tokens == 2


def test_tokens_are_those_of_the_prompt() -> None:
    opened = model()
    for unit in make_units(opened, CASES, Settings()).units:
        for one in unit.questions:
            parts = [one.frame.head, *one.case.documents, one.frame.tail]
            counts = [len(opened.encode(part)) for part in parts]
            assert (one.num_tokens, one.num_context) == (sum(counts), sum(counts[:-1]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (case("bad", [A, ""]), "case bad: document 2: has no tokens"),
        (case("bad", [A, LONG]), "case bad: document 2: "),
        (case("bad", [LONG]), f"takes {POSITIONS} positions; cut documents with --chunk-tokens, or leave such cases"),
        (case("bad", [A], query=LONG), "case bad: has "),
        (case("bad", [A], max_new_tokens=POSITIONS), "leave such cases out with --skip-long"),
        (case("bad", [A], query=" "), "case bad: the query is empty"),
        (case("bad", [A], query_template="?"), "case bad: query template '?': must contain {query}"),
    ],
)
def test_a_case_that_cannot_be_asked_is_named(wrong: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_units(model(), [case("good"), wrong], Settings())
    assert message in str(caught.value)


def test_a_case_fits_up_to_the_last_position() -> None:
    """All but the last token of the answer have a position."""
    opened, one = model(), case("1", [A])
    prompt = make_units(opened, [one], Settings()).units[0].questions[0].num_tokens
    assert make_units(opened, [one], Settings(max_new_tokens=POSITIONS - prompt + 1)).units
    with pytest.raises(InputError, match=f"{prompt} tokens of prompt"):
        make_units(opened, [one], Settings(max_new_tokens=POSITIONS - prompt + 2))


def test_what_is_too_long_is_left_out_if_asked_for() -> None:
    cases = [case("1", [C]), case("2", [LONG]), case("3", [A, LONG]), case("4"), case("5", query=LONG), case("6")]
    units = make_units(model(), cases, Settings(), skip_long=True)
    assert [one.case.id for unit in units.units for one in unit.questions] == ["1", "4", "6"]
    assert units.skipped == ("2", "3", "5") and len(units.units) == 2
    with pytest.raises(InputError, match="case 0: document 1: has no tokens"):
        make_units(model(), [case("0", [""]), *cases], Settings(), skip_long=True)


def test_chunks_that_are_cut_fit() -> None:
    assert len(make_units(model(), [case("1", [LONG[:800]])], Settings(chunk_tokens=100)).units[0].chunks) > 1
    units = make_units(model(), [case("1", [LONG])], Settings(chunk_tokens=2 * POSITIONS), skip_long=True)
    assert units.skipped == ("1",)


def test_an_answer_does_not_cross_the_switch_of_long_rope() -> None:
    """Long RoPE of this model changes at 128 tokens."""
    opened, one = subjects.subject("phi3-long").model, case("1", [A], max_new_tokens=128)
    with pytest.raises(InputError, match=r"case 1: has .* which cross 128, where the RoPE"):
        make_units(opened, [one], Settings())
    assert make_units(opened, [one], Settings(), skip_long=True).skipped == ("1",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_template": "?"}, "query template '?': must contain {query}"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0: must be 1 or more"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: must be 1 or more"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings(**fields)
    assert str(caught.value) == message
