from __future__ import annotations

import random

import pytest

from training.world.generate import ALL_KINDS, KINDS, Fact, PageShape, WorldPrompt, question_text, write_prompt


def prompts(count: int = 60, pages: int = 8) -> list[WorldPrompt]:
    return [write_prompt(random.Random(seed), pages) for seed in range(count)]


def statements(fact: Fact) -> list[str]:
    kind = ALL_KINDS[fact.kind]
    names = [fact.subject, *kind.pronouns]
    return [told.format(s=name, v=fact.value) for told in fact.attribute.statements for name in names]


def test_a_seed_gives_one_prompt() -> None:
    assert write_prompt(random.Random(3), 6) == write_prompt(random.Random(3), 6)
    assert write_prompt(random.Random(3), 6) != write_prompt(random.Random(4), 6)


def test_every_fact_is_told_on_its_page() -> None:
    for prompt in prompts():
        for fact in prompt.facts:
            assert any(statement in prompt.pages[fact.page] for statement in statements(fact))


def test_a_carried_fact_needs_the_page_before() -> None:
    for prompt in prompts():
        for fact in (fact for fact in prompt.facts if fact.is_carried):
            assert fact.named_on == fact.page - 1
            assert prompt.pages[fact.named_on].rstrip().endswith(fact.subject + ".") or (
                f"about {fact.subject}." in prompt.pages[fact.named_on]
            )
            assert fact.subject not in prompt.pages[fact.page]


def test_answers_follow_from_the_facts() -> None:
    kinds = set()
    for prompt in prompts():
        for question in prompt.questions:
            kinds.add(question.kind)
            assert question.answer == ", ".join(fact.value for fact in question.facts)
            assert question.facts[0].subject in question.text
            if question.kind == "two-hop":
                assert question.facts[1].subject == question.facts[0].value
            else:
                assert (question.kind == "carried") == question.facts[0].is_carried
    assert kinds == set(KINDS)


def test_a_question_has_one_answer() -> None:
    for prompt in prompts():
        asked = [(fact.subject, fact.attribute.name) for fact in prompt.facts]
        assert len(asked) == len(set(asked))


def test_attributes_are_shared_so_that_matching_them_alone_is_a_guess() -> None:
    candidates = [
        sum(other.attribute == fact.attribute for other in prompt.facts)
        for prompt in prompts()
        for fact in prompt.facts
    ]
    assert sum(candidates) / len(candidates) > 4


@pytest.mark.parametrize("sentences", [0, 6])
def test_filler_is_bounded(sentences: int) -> None:
    for seed in range(20):
        for page in write_prompt(random.Random(seed), 6, PageShape(max_filler_sentences=sentences)).pages:
            assert page.endswith(".\n")
            assert page.count(".") <= sentences + 8


def test_the_query_template() -> None:
    assert question_text("Who?") == "Question: Who?\nAnswer:"
