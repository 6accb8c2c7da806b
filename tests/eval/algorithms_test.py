"""What is compared: which algorithms names stand for, their labels, and their order in tables."""

from __future__ import annotations

import random

import pytest
from eval.shared import model, model_directory

from pictool.errors import InputError
from pictool.eval.algorithms import DEFAULT_ALGORITHMS, FULL, parse_algorithms
from pictool.eval.methods import MapReduce, MapRerank

SPECS = [
    "full", "naive", "cacheblend-5", "cacheblend-15", "cacheblend-15:on=k", "legolink-0", "legolink-2", "legolink-16",
    "speccache-15", "mapreduce", "mapreduce:summary_tokens=8", "maprerank",
]  # fmt: skip


def labels(*specs: str) -> list[str]:
    return [algorithm.label for algorithm in parse_algorithms(specs)]


def test_full_is_always_there_and_first() -> None:
    assert parse_algorithms([]) == [FULL]
    assert labels("naive") == labels("naive", "full") == ["full", "naive"]
    assert labels(*DEFAULT_ALGORITHMS) == ["full", "naive", "cacheblend-15", "legolink-16"]


def test_the_order_is_that_of_tables_whatever_is_named_first() -> None:
    assert labels(*SPECS) == SPECS
    for seed in range(5):
        assert labels(*random.Random(seed).sample(SPECS, len(SPECS))) == SPECS


def test_a_label_names_an_equal_algorithm_again() -> None:
    for algorithm in parse_algorithms(SPECS):
        assert parse_algorithms([algorithm.label])[-1] == algorithm


def test_methods_take_fields_and_prompts_with_colons() -> None:
    *_, reduce = parse_algorithms(["mapreduce:summary_tokens=8:prompt=Sum up: {text}\nSummary:"])
    assert reduce.method == MapReduce(prompt="Sum up: {text}\nSummary:", summary_tokens=8)
    assert parse_algorithms(["maprerank"])[-1].method == MapRerank()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "lego",
            "algorithm 'lego': must be one of cacheblend, fixup, full, legolink, legolink-0, naive, prefix, "
            "speccache, mapreduce",
        ),
        ("mapreduce:k=2", "mapreduce has no field 'k'"),
        ("mapreduce-3", "algorithm 'mapreduce-3': must be one of"),
        ("mapreduce:8", "mapreduce:8: must be mapreduce, or mapreduce:FIELD=VALUE"),
        ("mapreduce:summary_tokens=0", "summary_tokens=0 must be 1 or more"),
        ("mapreduce:prompt=Sum up", "must contain {text}, and ask for something after it"),
        ("mapreduce:prompt=Sum up {text}", "must contain {text}, and ask for something after it"),
        ("maprerank:prompt={query} {text}", "must contain {text}, and {query} after it"),
        ("legolink:k=x", "legolink: k='x' must be of type int"),
    ],
)
def test_what_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_algorithms([spec])
    assert message in str(caught.value)


def test_legolink_0_and_legolink_with_k_0_are_two() -> None:
    assert labels("legolink-0", "legolink:k=0") == ["full", "legolink-0", "legolink:k=0"]


def test_a_second_model_is_known_by_its_content() -> None:
    named = parse_algorithms([f"speccache:spec_model={model_directory(7)}"])[-1]
    assert named.other_model(model()) not in (None, model().fingerprint)
    assert (
        parse_algorithms([f"speccache:spec_model={model_directory()}"])[-1].other_model(model()) == model().fingerprint
    )
    assert [algorithm.other_model(model()) for algorithm in parse_algorithms(["speccache", "legolink"])] == [None] * 3
