"""The lock, `constraints.txt`, against pyproject.toml: it pins all that any extra installs, and keeps every bound."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS: dict[str, Version] = {
    canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in LINES)
}
# The last version with a known hole that input from outside reaches, and the first without.
HOLES = {"jinja2": ("3.1.5", "3.1.6"), "aiohttp": ("3.14.3", "3.14.4")}


def required() -> list[Requirement]:
    """What pyproject.toml names, with all extras but those that are this project's own."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in found if requirement.name != "pictool"]


def closure(requirements: list[Requirement]) -> Iterator[str]:
    """The names of all that these requirements install here, by the metadata of what is installed."""
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement.name, extra) for requirement in requirements for extra in ("", *requirement.extras)]
    while waiting:
        name, extra = waiting.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        yield name
        for line in distribution(name).requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting.extend((needed.name, more) for more in ("", *needed.extras))


def test_every_line_is_one_exact_version() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in LINES)
    assert len(PINS) == len(LINES)


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


def test_all_that_is_installed_is_pinned_and_nothing_else() -> None:
    names = set(closure(required()))
    assert {"torch", "aiohttp", "sympy", "markupsafe", "multidict"} <= names
    assert names <= PINS.keys(), f"constraints.txt: has no {', '.join(sorted(names - PINS.keys()))}; renew it"
    unused = PINS.keys() - names
    assert not unused, f"constraints.txt: nothing needs {', '.join(sorted(unused))}; renew it"
    here = {name: Version(distribution(name).version) for name in names}
    assert {name: version.public for name, version in here.items()} == {name: str(PINS[name]) for name in names}


def test_an_unknown_package_would_be_noticed() -> None:
    with pytest.raises(PackageNotFoundError):
        list(closure([Requirement("no-such-package-at-all")]))


def test_make_installs_by_the_lock() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert any("--constraint constraints.txt --editable" in line for line in lines)
