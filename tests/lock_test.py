"""The lock, `constraints.txt`, against pyproject.toml: it pins all that any extra installs, and keeps every bound."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def here(lines: Iterable[str]) -> list[Requirement]:
    """The requirements that hold on this system and Python."""
    return [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate({"extra": ""})]


PINNED = here(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
PINS = {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in PINNED}
# The last version with a known hole that input from outside reaches, and the first without.
HOLES = {"jinja2": ("3.1.5", "3.1.6"), "aiohttp": ("3.14.3", "3.14.4")}


def required() -> list[Requirement]:
    """What pyproject.toml names, with all extras."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = here(line for lines in lists for line in lines)
    return [requirement for requirement in found if requirement.name != "pictool"]


def test_every_line_is_one_exact_version_without_a_build() -> None:
    assert all(re.fullmatch(r"==[0-9][0-9A-Za-z.]*", str(pin.specifier)) for pin in PINNED)
    assert len(PINS) == len(PINNED)


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_the_lock_keeps_the_bounds_of_the_project(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)
    assert requirement.specifier or requirement.name.startswith("types-"), f"{requirement}: state the oldest version"


@pytest.mark.parametrize("name", HOLES)
def test_versions_with_known_holes_are_refused(name: str) -> None:
    (bound,) = (requirement.specifier for requirement in required() if canonicalize_name(requirement.name) == name)
    before, after = HOLES[name]
    assert bound.contains(after) and not bound.contains(before)


def test_what_is_installed_here_is_what_is_pinned() -> None:
    installed = {canonicalize_name(each.name): Version(each.version).public for each in distributions()}
    assert {"torch", "aiohttp", "sympy", "markupsafe", "multidict"} <= installed.keys()
    pinned = installed.keys() & PINS.keys()
    assert {name: installed[name] for name in pinned} == {name: str(PINS[name]) for name in pinned}


def test_make_installs_by_the_lock() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    unpinned = ("$(NEWEST)", "$(OLDEST)", "$(OPEN_WEBUI)")  # a program of others, which brings what it needs
    installs = [
        line
        for line in lines
        if line[:1] == "\t" and "pip install" in line and not any(map(line.__contains__, unpinned))
    ]
    assert not installs, "use $(INSTALL)"
    assert any(line.startswith("INSTALL := ") and "--constraint constraints.txt" in line for line in lines)
    assert sum(line.startswith("\t$(INSTALL) --editable") for line in lines) == 3
