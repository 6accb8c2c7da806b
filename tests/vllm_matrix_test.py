"""The matrix of vLLM's features: the test of each cell exists, and sees what the cell says."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from vllm_matrix import CELLS, REFUSED, RESULTS, RIGHT, Cell

IN_VLLM = Path(__file__).parent / "in_vllm"
ANSWERS = 50


def source_of(cell: Cell) -> str:
    return (IN_VLLM / cell.test.partition("::")[0]).read_text(encoding="utf-8")


def arguments_of(cell: Cell) -> list[str]:
    """The arguments of a cell's test, if there is one."""
    functions = {node.name: node for node in ast.parse(source_of(cell)).body if isinstance(node, ast.FunctionDef)}
    return [argument.arg for argument in functions[cell.test.partition("::")[2]].args.args]


@pytest.mark.parametrize("feature", [feature for feature, cell in CELLS.items() if cell.verdict == RIGHT])
def test_what_is_right_was_compared(feature: str) -> None:
    """By its test, which counts (`answered`), and 50 times in the committed results."""
    assert "answered" in arguments_of(CELLS[feature])
    seen = json.loads(RESULTS.read_text())["cells"][feature]
    assert seen["linked"] + seen["exact"] >= ANSWERS and min(seen["linked"], seen["exact"]) > 0
    assert seen["difference"] <= CELLS[feature].tolerance


@pytest.mark.parametrize("feature", [feature for feature, cell in CELLS.items() if cell.verdict == REFUSED])
def test_what_is_refused_is_seen_to_say_so(feature: str) -> None:
    cell = CELLS[feature]
    assert isinstance(arguments_of(cell), list) and cell.says in source_of(cell)


def test_tests_that_other_cells_name_exist() -> None:
    for cell in CELLS.values():
        assert not cell.test or isinstance(arguments_of(cell), list)


def test_the_results_are_those_of_the_cells() -> None:
    results = json.loads(RESULTS.read_text())
    assert set(results["cells"]) == {feature for feature, cell in CELLS.items() if cell.verdict == RIGHT}
    assert results["vllm"].startswith("0.32.")
