"""What is compared: which policies names stand for, their labels, and their order in tables."""

from __future__ import annotations

import random

import pytest
from eval.shared import model, model_directory

from pictool.errors import InputError
from pictool.eval.policies import DEFAULT_POLICIES, FULL, parse_policies
from pictool.eval.runner import second_fingerprint

SPECS = [
    "full", "naive", "cacheblend-5", "cacheblend-15", "cacheblend-15:on=k", "legolink-1", "legolink-2", "legolink-16",
    "speccache-15",
]  # fmt: skip


def labels(*specs: str) -> list[str]:
    return [labelled.label for labelled in parse_policies(specs)]


def test_full_is_always_there_and_first() -> None:
    assert parse_policies([]) == [FULL]
    assert labels("naive") == labels("naive", "full") == ["full", "naive"]
    assert labels(*DEFAULT_POLICIES) == ["full", "naive", "auto", "cacheblend-15", "legolink-16"]


def test_the_order_is_that_of_tables_whatever_is_named_first() -> None:
    assert labels(*SPECS) == SPECS
    for seed in range(5):
        assert labels(*random.Random(seed).sample(SPECS, len(SPECS))) == SPECS


def test_a_label_names_an_equal_policy_again() -> None:
    for labelled in parse_policies(SPECS):
        assert parse_policies([labelled.label])[-1] == labelled


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lego", "algorithm 'lego'"),
        ("legolink:k=x", "legolink: k='x'"),
    ],
)
def test_what_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_policies([spec])
    assert message in str(caught.value)


def test_legolink_0_is_legolink_with_k_0() -> None:
    assert labels("legolink-1", "legolink:k=1") == ["full", "legolink-1"]


def test_a_second_model_is_known_by_its_content() -> None:
    opened, other = model(), parse_policies([f"speccache:spec_model={model_directory(7)}"])[-1]
    assert second_fingerprint(opened, other.policy) not in (None, opened.fingerprint)
    same = parse_policies([f"speccache:spec_model={model_directory()}"])[-1]
    assert second_fingerprint(opened, same.policy) == opened.fingerprint
    named = parse_policies(["speccache", "legolink"])
    assert [second_fingerprint(opened, labelled.policy) for labelled in named] == [None] * 3
