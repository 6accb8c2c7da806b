"""The queries of examples/queries, on the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pictool.engines.torch import TorchEngine
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model, load_model
from pictool.spans.execute import Executor
from pictool.spans.reading import read_query
from pictool.spans.running import RunOptions
from pictool.store.store import Store

EXAMPLES = Path(__file__).parents[2] / "examples" / "queries"
ANSWERS = {"rag.yaml": "Nava", "judge.yaml": "Nava", "mapreduce.yaml": "Zado, Sabstead", "email.json": None}


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("embedded")


@pytest.mark.parametrize("policy", ["full", "legolink"])
@pytest.mark.parametrize("name", ANSWERS)
def test_examples_run_and_are_right(model: Model, store: Store, name: str, policy: str) -> None:
    options = RunOptions(make_policy(policy), base=EXAMPLES)
    executor = Executor(lambda name: TorchEngine(model, store), options)
    result = executor.run(executor.optimise(read_query((EXAMPLES / name).read_text())).after)
    assert result.text == ANSWERS[name] or (ANSWERS[name] is None and result.done[-1].own["tokens"]["generated"] > 0)


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix != ".md"} == ANSWERS.keys()
