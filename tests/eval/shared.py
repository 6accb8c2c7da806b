"""What the tests of evaluations share: a dataset written down here, a tiny model on disk, and a run of both."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import tiny
from transformers import LlamaConfig

from pictool.eval.cases import SpecOptions
from pictool.eval.datasets.base import Case, Dataset
from pictool.eval.evaluate import Evaluation, EvaluationOptions, evaluate
from pictool.eval.policies import parse_policies
from pictool.eval.summary import summarise
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store

POSITIONS = 512
SPECS = ("naive", "legolink-2", "cacheblend-30", "legolink-1")
A = "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"
B = 'Numbers such as 1,024 or 3.14 stand here too, and words. "Really?" she asked.\n'
C = "Nobody knows the harbour, and emoji 🙂 stand in the spring.\n"


def case(name: str, documents: Sequence[str] = (A, B), **more: Any) -> Case:
    return Case(**{
        "id": name, "documents": tuple(documents), "query": f"Who knows {name}?", "answers": ("she",),
        "max_new_tokens": 4, **more,
    })  # fmt: skip


CASES = (
    case("one", kind="x"),
    case("two", kind="y", head="You are.", metric="em"),
    case("three", [C, A, B], kind="x", query_template=" {query}!", stop=("e",)),
    case("four", [B], kind="y", max_new_tokens=9),
)


@dataclass(frozen=True)
class CaseList(Dataset):
    """Cases as they are."""

    name: ClassVar[str] = "given"
    reference: ClassVar[str] = "here"
    listed: tuple[Case, ...] = CASES

    @property
    def params(self) -> dict[str, Any]:
        return {"cases": len(self.listed)}

    def cases(self) -> Iterator[Case]:
        yield from self.listed


@cache
def model_directory(seed: int = 0) -> Path:
    """A tiny Llama on disk, for this process."""
    directory = Path(tempfile.mkdtemp(prefix="pic-eval-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return tiny.save_model(directory, LlamaConfig(**{**tiny.SIZE, "max_position_embeddings": POSITIONS}), seed)


def model() -> Model:
    """Opened anew: no test sees what another one did to it."""
    return load_model(str(model_directory()), "cpu", "float32")


def run(
    store: Store,
    specs: Sequence[str] = SPECS,
    dataset: Dataset = CaseList(),
    options: SpecOptions = SpecOptions(),
    **run_options: Any,
) -> Evaluation:
    return evaluate(model(), store, dataset, parse_policies(specs), options, EvaluationOptions(**run_options))


def numbers(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Everything of the results that does not depend on the clock or on memory."""
    return [result.numbers for result in evaluation.results]


def steady(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Everything of the table that does not depend on the clock or on memory."""
    from pictool.eval.summary import MEASURED

    report = summarise(evaluation).report()
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in report["lines"]]
