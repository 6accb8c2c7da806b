"""The embedded world as a dataset: fixed by its fields, and no prompt that a model was trained or scored on."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.questions.world import MAX_CHUNKS, World
from pictool.errors import InputError
from training.world.generate import write_prompt

ROOT = Path(__file__).parents[2]


def test_cases_by_kind() -> None:
    cases = list(World(prompts=30, per_kind=2).cases())
    count = Counter(case.kind for case in cases)
    assert count["local"] == count["carried"] == 60 and 0 < count["two-hop"] < 60
    assert all(len(case.documents) == 6 and case.documents[0].endswith("\n") for case in cases)
    assert {(case.metric, case.stop, case.max_new_tokens, case.head) for case in cases} == {("em", ("\n",), 8, None)}
    for case in cases:
        assert all(part in "".join(case.documents) for part in case.answers[0].split(", "))


def test_fewer_prompts_kinds_or_questions_are_the_same_cases() -> None:
    by_id = {case.id: case for case in World(prompts=20).cases()}
    for fewer in (World(prompts=5), World(prompts=20, kinds=("two-hop",)), World(prompts=20, per_kind=1)):
        cases = list(fewer.cases())
        assert 0 < len(cases) < len(by_id)
        assert all(by_id[case.id] == case for case in cases)


def test_another_seed_is_another_world() -> None:
    ours, theirs = ({case.documents for case in World(seed=seed, prompts=20).cases()} for seed in (0, 1))
    assert len(ours) == len(theirs) == 20 and not ours & theirs


def test_the_seeds_are_none_of_trainings() -> None:
    """Every text that seeds a prompt elsewhere begins otherwise."""
    sources = [*ROOT.glob("training/*.py"), *ROOT.glob("benchmarks/*.py")]
    seeds = [seed for path in sources for seed in re.findall(r'Random\(f?"([^"]*)"', path.read_text())]
    assert len(seeds) >= 3 and not [seed for seed in seeds if seed.startswith("eval")]
    prompt = write_prompt(random.Random("eval-0-6-0-0"), 6)  # what fixes the cases from release to release
    assert next(World().cases()).documents == prompt.pages


def test_as_many_chunks_as_there_are_names_for() -> None:
    cases = list(World(prompts=60, chunks=MAX_CHUNKS, per_kind=1).cases())
    assert {len(case.documents) for case in cases} == {MAX_CHUNKS}
    assert sum(case.kind == "carried" for case in cases) == 60


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": 0}, "world: prompts=0"),
        ({"per_kind": -1}, "world: per_kind=-1"),
        ({"chunks": 0}, "world: chunks=0"),
        ({"chunks": 33}, "world: chunks=33"),
        ({"kinds": ()}, "world: kinds="),
        ({"kinds": ("local", "far")}, "world: kinds=local,far"),
        ({"kinds": ("local", "local")}, "kinds=local,local"),
        ({"kinds": ("carried",), "chunks": 1}, "world: 100 prompts of 1 chunks"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        list(World(**fields).cases())
    assert message in str(caught.value)
