"""Groups of cases: documents once, every case with the spec that it asks for, and none that the model cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import subjects
from eval.shared import CASES, POSITIONS, A, B, C, case, model

from pictool.core import PromptText
from pictool.errors import InputError
from pictool.eval.cases import SpecOptions, group_cases

LONG = "harbour " * POSITIONS


def test_consecutive_cases_with_equal_documents_make_a_group() -> None:
    cases = [case("1"), case("2", [A]), case("3", [A]), case("4", [A, B]), case("5", [A, B])]
    groups = group_cases(model(), cases, SpecOptions()).groups
    assert [[prepared.id for prepared in group.cases] for group in groups] == [["1"], ["2", "3"], ["4", "5"]]
    assert [[chunk.text for chunk in group.chunks] for group in groups] == [[A, B], [A], [A, B]]


def test_a_question_is_asked_as_its_case_says() -> None:
    (first, second), third, _ = (group.cases for group in group_cases(model(), CASES, SpecOptions()).groups)
    assert (first.frame.head.text, first.frame.tail.text) == ("<s>", "Question: Who knows one?\nAnswer:")
    assert second.frame.head.text == "<s>You are.\n\n"
    assert third[0].frame.tail.text == " Who knows three?!" and third[0].spec.max_new_tokens == 4


def test_options_come_before_the_case() -> None:
    options = SpecOptions(head="Hey.", query_template="Q {query}", max_new_tokens=2, chunk_tokens=5)
    for group in group_cases(model(), CASES, options).groups:
        assert all(1 <= len(chunk) <= 5 for chunk in group.chunks)
        assert "".join(chunk.text for chunk in group.chunks) == "".join(group.cases[0].case.documents)
        for prepared in group.cases:
            assert (prepared.frame.head.text, prepared.frame.tail.text) == ("<s>Hey.\n\n", f"Q {prepared.case.query}")
            assert prepared.spec.max_new_tokens == 2


def test_stop_texts_take_the_place_of_the_case_s() -> None:
    cases = [case("1", stop=("\n",)), case("2")]
    for options, wanted in ((SpecOptions(stop=(".", "!")), [(".", "!")] * 2), (SpecOptions(), [("\n",), ()])):
        (group,) = group_cases(model(), cases, options).groups
        assert [prepared.spec.sampling.stop for prepared in group.cases] == wanted
    with pytest.raises(InputError):
        SpecOptions(stop=("",))


def test_tokens_are_those_of_the_prompt() -> None:
    opened = model()
    for group in group_cases(opened, CASES, SpecOptions()).groups:
        for prepared in group.cases:
            documents = [part for text in prepared.case.documents for part in (text, "\n")]  # each ends in one
            tail = PromptText("\n") + prepared.frame.tail
            parts: list[str | PromptText] = [prepared.frame.head, *documents[:-1], tail]
            counts = [len(opened.encode(part)) for part in parts]
            assert (prepared.num_tokens, prepared.num_context) == (sum(counts), sum(counts[:-1]))


def test_pieces_of_one_text_follow_one_another() -> None:
    opened, texts = model(), [A[:20], A[20:40], A[40:]]
    prompts = [case("pieces", texts, is_one_text=True), case("documents", texts), case("joined", [A], separator="")]
    one, several, joined = (group_cases(opened, [each], SpecOptions()).groups[0].cases[0] for each in prompts)
    length = 1 + sum(len(opened.encode(text)) for text in texts)
    assert one.num_context == length and several.num_context == length + 2 * len(opened.encode("\n\n"))
    assert joined.num_tokens == joined.num_context + len(opened.encode(joined.frame.tail))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (case("bad", [A, ""]), "case bad: document 2"),
        (case("bad", [A], query=" "), "case bad"),
        (case("bad", [A], query_template="?"), "case bad: query template '?'"),
    ],
)
def test_a_case_that_cannot_be_asked_is_named(wrong: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        group_cases(model(), [case("good"), wrong], SpecOptions())
    assert message in str(caught.value)


def test_a_case_fits_up_to_the_last_position() -> None:
    """All but the last token of the answer have a position."""
    opened, short = model(), case("1", [A])
    prompt = group_cases(opened, [short], SpecOptions()).groups[0].cases[0].num_tokens
    assert group_cases(opened, [short], SpecOptions(max_new_tokens=POSITIONS - prompt + 1)).groups
    longer = group_cases(opened, [short], SpecOptions(max_new_tokens=POSITIONS - prompt + 2))
    assert longer.skipped == ("1",) and not longer.groups


def test_what_is_too_long_is_left_out() -> None:
    cases = [case("1", [C]), case("2", [LONG]), case("3", [A, LONG]), case("4"), case("5", query=LONG), case("6")]
    grouped = group_cases(model(), cases, SpecOptions())
    assert [prepared.id for group in grouped.groups for prepared in group.cases] == ["1", "4", "6"]
    assert grouped.skipped == ("2", "3", "5") and len(grouped.groups) == 2
    with pytest.raises(InputError, match=r"^case 0: document 1: "):
        group_cases(model(), [case("0", [""]), *cases], SpecOptions())


def test_chunks_that_are_cut_fit() -> None:
    assert len(group_cases(model(), [case("1", [LONG[:800]])], SpecOptions(chunk_tokens=100)).groups[0].chunks) > 1
    grouped = group_cases(model(), [case("1", [LONG])], SpecOptions(chunk_tokens=2 * POSITIONS))
    assert grouped.skipped == ("1",)


def test_an_answer_does_not_cross_the_switch_of_long_rope() -> None:
    """Long RoPE of this model changes at 128 tokens."""
    opened, long = subjects.subject("phi3-long").model, case("1", [A], max_new_tokens=128)
    assert group_cases(opened, [long], SpecOptions()).skipped == ("1",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_template": "?"}, "query template '?'"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
    ],
)
def test_options_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        SpecOptions(**fields)
    assert str(caught.value).startswith(f"{message}: ")
