"""The licences of all that pictool requires, as their packages state them (`make licences`).

    python -m benchmarks.licences

A line for each package that the core or an extra needs here, directly or not: its version, its licence, and which of
them need it. What is not installed is named at the end. Exit code 1 if a package states none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, metadata, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OF_DEVELOPERS = ("clients", "test", "dev")
MOST = 60  # characters of a licence


def licence_of(name: str) -> str:
    """The licence that a package states: an SPDX expression, else classifiers, else the first line of its own text."""
    facts = metadata(name).json
    if expression := facts.get("license_expression"):
        return str(expression)
    found = [line.split(" :: ")[-1] for line in facts.get("classifier", ()) if line.startswith("License ::")]
    return ", ".join(found) or "".join(str(facts.get("license", "")).strip().splitlines()[:1])


def required(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """What a package requires directly on this system, with these extras."""
    for requirement in map(Requirement, distribution(name).requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def reached(extra: str) -> set[str]:
    """All packages that pictool needs with an extra; for the core it is empty."""
    found, pending = set[tuple[str, frozenset[str]]](), [*required("pictool", [extra])]
    while pending:
        requirement = pending.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in found:
            continue
        found.add((name, extras))
        with suppress(PackageNotFoundError):
            pending += required(name, extras)
    return {name for name, _ in found} - {"pictool"}


def main() -> None:
    extras = [extra for extra in metadata("pictool").get_all("Provides-Extra", []) if extra not in OF_DEVELOPERS]
    core = reached("")
    users = dict.fromkeys(core, "core")
    for extra in extras:
        for name in reached(extra) - core:
            users[name] = f"{users[name]}, {extra}" if name in users else extra
    missing, unstated = list[str](), list[str]()
    for name in sorted(users):
        try:
            licence = licence_of(name)
        except PackageNotFoundError:
            missing.append(f"{name} ({users[name]})")
            continue
        if not licence:
            unstated.append(name)
        print(f"{name} {version(name)} | {licence[:MOST] or 'NOT STATED'} | {users[name]}")
    if missing:
        print(f"not installed here: {', '.join(missing)}")
    if unstated:
        sys.exit(f"no licence is stated by {', '.join(unstated)}: see their sources")


if __name__ == "__main__":
    main()
