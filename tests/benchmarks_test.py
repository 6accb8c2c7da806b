"""The scripts of benchmarks/: every results file has its command, and every command names a script that there is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fresh
from benchmarks.query_tables import STUDY, TABLES, replaced, table_of
from benchmarks.real import rows

RUN_BY_MAKE = ("gpu", "gpu_parts", "gpu_links")  # `make gpu`
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
README = (BENCHMARKS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(path.name for path in (BENCHMARKS / "results").iterdir()))
def test_every_results_file_has_a_command(name: str) -> None:
    assert any(line.startswith("| `") and f"`{name}`" in line.split("|")[1] for line in README.splitlines())


def test_commands_name_scripts_that_there_are() -> None:
    named = set(re.findall(r"-m benchmarks\.(\w+)", README))
    assert named and not [
        name
        for name in named
        if not (BENCHMARKS / f"{name}.py").exists() and not (BENCHMARKS / name / "__main__.py").exists()
    ]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_study_of_span_queries_has_the_tables_of_the_results(name: str) -> None:
    study = STUDY.read_text(encoding="utf-8")
    assert replaced(study, table_of(name)) == study


def test_the_page_of_results_has_the_table_of_the_files() -> None:
    page = rows.PAGE.read_text(encoding="utf-8")
    assert rows.with_table(page) == page, "run `python -m benchmarks.real --add`"
    files = [*rows.EARLIER, *(path.name for path in rows.ROWS.glob("*"))]
    assert all(page.count(f"[`{name}`]") == 1 for name in files)


@pytest.mark.parametrize("path", sorted(rows.ROWS.glob("*")), ids=lambda path: path.name)
def test_rows_name_no_path_of_a_machine(path: Path) -> None:
    row = json.loads(path.read_text(encoding="utf-8"))
    assert row["command"].startswith("python -m benchmarks.real ")
    assert not re.search(r"(^|[ =])/\w", f"{row['command']} {row['model']['name']}")


def test_contributing_has_the_table_of_fresh_machines() -> None:
    results, page = BENCHMARKS / "results" / "fresh.json", fresh.CONTRIBUTING.read_text(encoding="utf-8")
    runs = json.loads(results.read_text())["runs"] if results.exists() else []
    assert fresh.HEAD in page and fresh.with_table(page, runs) == page


def test_a_machine_s_older_result_is_replaced(tmp_path: Path) -> None:
    first = fresh.Result("Debian 13", "3.13", "2.13.0+cu130", "a", "c", 60, 50, 2800, 5000, None, None, "not run")
    path, page = tmp_path / "fresh.json", f"Text\n\n{fresh.table([])}\n\nmore"
    for result in (first, replace(first, torch="2.13.0+cpu"), replace(first, date="b", test_s=600, test_mb=6000)):
        fresh.record(result, path)
    runs = json.loads(path.read_text())["runs"]
    assert [(run["torch"], run["date"]) for run in runs] == [("2.13.0+cpu", "a"), ("2.13.0+cu130", "b")]
    shown = fresh.with_table(fresh.with_table(page, runs), runs)
    assert shown.count("cu130") == 1 and "| 10.0 | 6.0 | not run |" in shown and shown.endswith("|\n\nmore")


def test_downloads_are_those_of_pip_s_log() -> None:
    log = "t   Downloading a-1.whl (190.5 MB)\nt  Downloading b.whl.metadata (11 kB)\nt  Using cached c.whl (3 MB)\n"
    assert fresh.downloaded_mb(log) == 191


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_says_how_it_is_run(path: Path) -> None:
    if path.stem in RUN_BY_MAKE:
        assert "make gpu" in path.read_text(encoding="utf-8") and "`make gpu`" in README
    elif path.stem not in ("__init__", "output", "overlap", "pictures", "subject"):  # what scripts share
        assert f"python -m benchmarks.{path.stem}" in path.read_text(encoding="utf-8")
        assert f"benchmarks.{path.stem}" in README
