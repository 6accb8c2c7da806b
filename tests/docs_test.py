"""The docs against the tree: links, paths, options, settings and fields that they name exist, and none is missing."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from commands.run import pic
from documentation_site.hooks import navigation
from typer.testing import CliRunner
from write_reference import rewritten

from pictool.eval.datasets import datasets
from pictool.linker.policies import policies
from pictool.runtime.architectures import ARCHITECTURES, IN_VLLM, REFUSED, WRAPPERS
from pictool.store.codecs import codecs

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "training/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("pictool", "tests", "tools", "benchmarks", "training", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(
    r"\b(?:pictool|tests|benchmarks|training|fixtures|examples)/[\w./-]*\w\.(?:py|jsonl\.zst|json|jsonl|yaml|md)\b"
)
_MODULE = re.compile(r"python -m ((?:benchmarks|training)\.\w+)")
_CITED = re.compile(r"docs/[\w/-]+\.md(?:,? §(\d))?")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def section(page: str, heading: str) -> str:
    """The text under a heading of the second level."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return next(part for part in text.split("\n## ")[1:] if part.partition("\n")[0] == heading)


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.name)
def test_generated_tables_are_those_of_the_program(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == rewritten(text), "run `make reference`"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in _LINK.findall(text_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}: no such file"
        assert not anchor or anchor in anchors(target), f"{page}: {link}: no such heading"


def test_the_site_s_navigation_has_every_page_once() -> None:
    groups = navigation()
    assert list(groups) == ["Guides", "Recipes", "Reference", "Studies", "Internals"]
    named = sorted(page for pages in groups.values() for page in pages if page.startswith("docs/"))
    assert named == [page for page in PAGES if page.startswith("docs/") and page != "docs/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_modules_that_are_named_exist(page: str) -> None:
    text = text_of(page)
    examples = {
        "pictool/linker/policies/stride.py",
        "pictool/store/codecs/lzma_codec.py",
        "pictool/eval/datasets/triples.py",
    }
    missing = {path for path in _PATH.findall(text) if not (ROOT / path).exists()} - examples
    assert not missing
    modules = [ROOT / module.replace(".", "/") for module in _MODULE.findall(text)]
    assert all(path.with_suffix(".py").exists() or (path / "__main__.py").exists() for path in modules)


@pytest.mark.parametrize(
    "source", [name for name in SOURCES if "docs/" in text_of(name) and name != "tests/docs_test.py"]
)
def test_code_cites_pages_and_sections_that_exist(source: str) -> None:
    for cited in _CITED.finditer(text_of(source)):
        page = ROOT / cited[0].partition(".md")[0]
        if page.parent.name == "docs" and page.name in ("a", "b", "x"):
            continue
        assert page.with_suffix(".md").exists(), f"{source}: {cited[0]}"
        if cited[1]:
            assert f"\n## §{cited[1]} " in page.with_suffix(".md").read_text(encoding="utf-8"), f"{source}: {cited[0]}"


def program() -> typer.Typer:
    """`pic`, as pyproject.toml names it."""
    package, _, function = tomllib.loads(text_of("pyproject.toml"))["project"]["scripts"]["pic"].partition(":")
    assert callable(getattr(importlib.import_module(package), function))
    app: typer.Typer = importlib.import_module(f"{package}.app").app
    return app


def commands(command: Any, name: str = "pic") -> Iterator[tuple[str, list[str]]]:
    """Every command of the program by its words, and its options."""
    if not hasattr(command, "list_commands"):
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        yield name, [option for parameter in options for option in (*parameter.opts, *parameter.secondary_opts)]
        return
    context = typer.Context(command)
    for word in command.list_commands(context):
        yield from commands(command.get_command(context, word), f"{name} {word}")


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "recipes").glob("*.md")), ids=lambda page: page.stem)
def test_a_recipe_is_short_and_in_the_index(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("\n") <= 40
    assert f"](recipes/{page.name})" in text_of("docs/README.md")
    assert "benchmarks/results/" in text  # what it saved


@pytest.mark.parametrize(("name", "options"), list(commands(typer.main.get_command(program()))))
def test_every_option_is_in_the_reference(name: str, options: list[str]) -> None:
    verb, word = " ".join(name.split()[:2]), name.split()[-1]
    text = section("commands.md", f"`{verb}`") + section("commands.md", "Common options")
    assert "--json" in options or word in ("serve", "mcp", "tui", "pin", "unpin", "key", "sign")
    assert re.search(rf"`pic [^`]*\b{word}\b", text)
    missing = [option for option in options if not re.search(rf"`[^`]*(?<![\w-]){re.escape(option)}(?![\w-])", text)]
    assert not missing, f"docs/reference/commands.md: {name} has {', '.join(missing)}"


@pytest.mark.parametrize("name", policies())
def test_every_field_of_a_policy_is_in_the_reference(name: str) -> None:
    text = (REFERENCE / "policies.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in text
    for field in fields(policies()[name]):
        assert f"| `{field.name}` |" in section("policies.md", f"`{name}`")


def test_every_setting_is_in_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REFERENCE / "pic-yaml.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("pic.yaml").write_text("nope: 1")
    known = (
        CliRunner()
        .invoke(program(), ["store", "ls", "--stats"])
        .stderr.partition("known keys: ")[2]
        .strip()
        .split(", ")
    )
    assert "model" in known
    assert [key for key in known if f"| `{key}` |" not in text] == []
    source = "".join(text_of(name) for name in SOURCES if name.startswith("pictool/"))
    assert {name for name in re.findall(r"\bPIC_[A-Z_]+\b", source) if f"`{name}`" not in text} == set()


def test_every_codec_and_dataset_is_in_the_reference() -> None:
    formats, evaluation = ((REFERENCE / name).read_text(encoding="utf-8") for name in ("formats.md", "evaluation.md"))
    assert [name for name in codecs() if f"| `{name}` |" not in formats] == []
    for dataset in datasets().values():
        missing = [
            field.name for field in fields(dataset) if field.name != "path" and f"`{field.name}`" not in evaluation
        ]
        assert not missing, f"{dataset.name}: {missing}"


def console(page: str) -> list[tuple[str, list[str]]]:
    """The commands of a page's console blocks, with the lines of output shown below each."""
    shown: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```\n(\$ .*?)```", text_of(page), re.S):
        for part in re.split(r"(?m)^\$ ", block)[1:]:
            document = re.match(r"[^\n]*<<'END'\n.*?^END\n", part, re.S | re.M)
            command = document[0] if document else part.partition("\n")[0]
            shown.append((command, part.removeprefix(command).strip().splitlines()))
    return shown


def test_the_page_on_the_mechanism_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands, run in its order, print the lines that it shows, but for times and what it leaves out (…)."""
    monkeypatch.setenv("COLUMNS", "80")
    compared = 0
    for command, lines in console("docs/guides/how-linking-works.md"):
        if command.startswith("pic "):
            words = [
                name for word in shlex.split(command)[1:] for name in (sorted(map(str, Path().glob(word))) or [word])
            ]
            run = pic(*words)
            printed = (run.out + run.err).splitlines()
        else:
            run_shell = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
            printed = run_shell.stdout.splitlines()
        for line in lines:
            if line != "…" and not re.search(r"\bms\b", line):
                assert line in printed, f"{command}: {printed}"
                compared += 1
    assert compared == 15


def test_the_readme_s_examples_are_typed(tmp_path: Path) -> None:
    """Under mypy, strict as pyproject.toml has it; with the cache of `make check`, if there is one."""
    paths = []
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text_of("README.md"), re.S)):
        paths.append(tmp_path / f"example{number}.py")
        paths[-1].write_text(code)
    assert len(paths) == 2
    checked = subprocess.run([sys.executable, "-m", "mypy", *paths], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def _model_rows(heading: str) -> list[tuple[str, str]]:
    """The rows of a table of models, without its first."""
    return re.findall(r"^\| `(\w+)` \| (.*?) ?\|$", section("models.md", heading), re.MULTILINE)[1:]


def test_the_models_are_those_of_the_registry() -> None:
    assert [kind for kind, _ in _model_rows("Supported")] == list(ARCHITECTURES)
    assert tuple(re.findall(r"`(\w+)`", section("models.md", "In vLLM"))) == IN_VLLM
    assert [kind for kind, _ in _model_rows("Models of images and text")] == list(WRAPPERS)
    assert dict(_model_rows("Refused")) == dict(REFUSED)
