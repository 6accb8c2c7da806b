"""The lock, `constraints.txt`, against pyproject.toml: it pins all that any extra installs, and keeps every bound."""

from __future__ import annotations

import platform
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from write_lock import closure, of_build, requires_here

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS: dict[str, Version] = {
    canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in LINES)
}
# The last version with a known hole that input from outside reaches, and the first without.
HOLES = {"jinja2": ("3.1.5", "3.1.6"), "aiohttp": ("3.14.3", "3.14.4")}


APART = ("llamacpp", "torchao")  # are installed beside the others, with constraints of their own


def required() -> list[Requirement]:
    """What pyproject.toml names, with all extras but those that are this project's own, or have their own lock."""
    extras = [lines for name, lines in PROJECT["optional-dependencies"].items() if name not in APART]
    lists = [PROJECT["dependencies"], *extras]
    found = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in found if requirement.name != "pictool"]


def test_every_line_is_one_exact_version() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in LINES)
    assert len(PINS) == len(LINES)


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_the_lock_keeps_the_bounds_of_the_project(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)
    assert requirement.specifier or requirement.name.startswith("types-"), f"{requirement}: state the oldest version"


@pytest.mark.parametrize("extra", APART)
def test_what_is_installed_apart_has_its_own_lock(extra: str) -> None:
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"][extra])
    lines = (ROOT / f"constraints-{extra}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert requirement.specifier.contains(pins[requirement.name]) and not pins.keys() & PINS.keys()


@pytest.mark.parametrize("name", HOLES)
def test_versions_with_known_holes_are_refused(name: str) -> None:
    (bound,) = (requirement.specifier for requirement in required() if canonicalize_name(requirement.name) == name)
    before, after = HOLES[name]
    assert bound.contains(after) and not bound.contains(before)


def test_all_that_is_installed_is_pinned_and_nothing_else() -> None:
    """On any system and Python, with any build of torch: a pin that only others need is not superfluous."""
    names = set(closure(required()))
    assert {"torch", "aiohttp", "sympy", "markupsafe", "multidict"} <= names
    assert names <= PINS.keys(), f"constraints.txt: has no {', '.join(sorted(names - PINS.keys()))}; renew it"
    elsewhere = {needed.name for needed in required()}
    elsewhere |= {Requirement(line).name for name in names for line in distribution(name).requires or ()}
    unused = PINS.keys() - names - set(map(canonicalize_name, elsewhere))
    assert not unused, f"constraints.txt: nothing needs {', '.join(sorted(unused))}; renew it"
    here = {name: Version(distribution(name).version) for name in names}
    assert {name: version.public for name, version in here.items()} == {name: str(PINS[name]) for name in names}


LINUX = f'platform_system == "{platform.system()}"'  # whatever this is
TORCH = ["sympy>=1.13.3", "jinja2", 'optree>=0.13; extra == "optree"']
CUDA = [f"cuda-toolkit[cublas]==13.0.3; {LINUX}", f'triton==3.7.1; {LINUX} and python_version < "4"']
METADATA = {
    "pictool": ["torch", "numpy"], "torch": TORCH, "sympy": ["mpmath"],
    "triton": ["importlib-metadata; python_version < '3'"],
    "cuda-toolkit": ["nvidia-cublas==13.*; extra == 'cublas'", "nvidia-cufft==12.*; extra == 'cufft'"],
    "nvidia-cublas": ["nvidia-cuda-nvrtc"],
}  # fmt: skip
OURS = {"pictool", "torch", "numpy", "sympy", "mpmath", "jinja2"}
BROUGHT = {"cuda-toolkit", "nvidia-cublas", "nvidia-cuda-nvrtc", "triton"}


@pytest.mark.parametrize(("more", "brought"), [([], set()), (CUDA, BROUGHT)], ids=["CPU build", "CUDA build"])
def test_what_torch_s_build_brings_is_not_ours_to_pin(more: list[str], brought: set[str]) -> None:
    metadata = METADATA | {"torch": [*TORCH, *more]}
    assert set(closure([Requirement("pictool")], metadata.get)) == OURS
    assert of_build(OURS | brought, metadata.get) == brought


def test_what_others_need_as_well_is_ours_to_pin() -> None:
    metadata = METADATA | {"torch": [*TORCH, *CUDA], "numpy": ["nvidia-cublas"]}
    needed = {"nvidia-cublas", "nvidia-cuda-nvrtc"}
    assert set(closure([Requirement("pictool")], metadata.get)) == OURS | needed
    assert of_build(OURS | BROUGHT, metadata.get) == BROUGHT - needed


def test_an_unknown_package_would_be_noticed() -> None:
    with pytest.raises(PackageNotFoundError):
        list(closure([Requirement("no-such-package-at-all")]))
    # but not among what vLLM's CPU build requires, of which some is left out
    assert requires_here("no-such-package-at-all") is None and requires_here("torch")


def test_make_installs_by_the_lock() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    installs = [line for line in lines if line.startswith("\t") and "pip install" in line and "$(LOCKING)" not in line]
    assert not installs, "use $(INSTALL)"
    assert any(line.startswith("INSTALL := ") and "--constraint constraints.txt" in line for line in lines)
    assert sum(line.startswith("\t$(INSTALL) --editable") for line in lines) == 3
