"""The scripts of benchmarks/: every results file has its command, and every command names a script that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.query_tables import STUDY, TABLES, replaced, table_of

RUN_BY_MAKE = ("gpu", "gpu_parts")  # `make gpu`
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
README = (BENCHMARKS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(path.name for path in (BENCHMARKS / "results").iterdir()))
def test_every_results_file_has_a_command(name: str) -> None:
    assert any(line.startswith("| `") and f"`{name}`" in line.split("|")[1] for line in README.splitlines())


def test_commands_name_scripts_that_there_are() -> None:
    named = set(re.findall(r"-m benchmarks\.(\w+)", README))
    assert named and not [name for name in named if not (BENCHMARKS / f"{name}.py").exists()]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_study_of_span_queries_has_the_tables_of_the_results(name: str) -> None:
    study = STUDY.read_text(encoding="utf-8")
    assert replaced(study, table_of(name)) == study


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_says_how_it_is_run(path: Path) -> None:
    if path.stem in RUN_BY_MAKE:
        assert "make gpu" in path.read_text(encoding="utf-8") and "`make gpu`" in README
    elif path.stem not in ("__init__", "output"):
        assert f"python -m benchmarks.{path.stem}" in path.read_text(encoding="utf-8")
        assert f"benchmarks.{path.stem}" in README
