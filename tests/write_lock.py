"""Write what is installed in this environment as a lock: `python tests/write_lock.py constraints.txt`.

The comment at the head of the file stays. Build tags are left out: a CPU build and the ordinary one both satisfy a pin.
So is what was installed from a file: whoever installs it names its version. So is what torch's build brings.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TORCH = "torch"
# No platform that there is: a marker that holds here and not there depends on the platform.
_NOWHERE = dict.fromkeys(("sys_platform", "platform_system", "platform_machine", "os_name"), "")
Requires = Callable[[str], Iterable[str] | None]  # what a distribution's metadata requires; None: nothing


def applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def is_of_build(requirement: Requirement) -> bool:
    """Whether a requirement of torch's belongs to its build: it depends on the platform (CUDA's packages, Triton).

    torch pins them, and another build has others: they are not ours to pin.
    """
    return requirement.marker is not None and not requirement.marker.evaluate({"extra": "", **_NOWHERE})


def closure(
    requirements: Iterable[Requirement], required_by: Requires = requires, with_build: bool = False
) -> Iterator[str]:
    """The names of all that these requirements install here, but for what only torch's build brings.

    Args:
        with_build: with that, too.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    seen: set[tuple[str, str]] = set()
    waiting = [(each.name, extra) for each in requirements if applies(each) for extra in ("", *each.extras)]
    while waiting:
        name, extra = waiting.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        yield name
        for needed in map(Requirement, required_by(name) or ()):
            if applies(needed, extra) and (with_build or name != TORCH or not is_of_build(needed)):
                waiting.extend((needed.name, more) for more in ("", *needed.extras))


def of_build(installed: Iterable[str], required_by: Requires = requires) -> set[str]:
    """The names of what is installed for nothing but torch's build."""
    build = [needed for needed in map(Requirement, required_by(TORCH) or ()) if is_of_build(needed)]
    brought = set(closure(build, required_by, with_build=True))
    others = (Requirement(name) for name in installed if canonicalize_name(name) not in brought)
    return brought - set(closure(others, required_by))


def requires_here(name: str) -> Iterable[str] | None:
    """What an installed distribution requires; nothing of one that is left out, as by tests/in_vllm/install.py."""
    try:
        return requires(name)
    except PackageNotFoundError:
        return None


def main(path: Path) -> None:
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    freeze = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    installed = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.splitlines()
    pins = [line.partition("+")[0] for line in installed if " @ " not in line]
    left_out = of_build((each.name for each in distributions()), requires_here)
    kept = [pin for pin in pins if canonicalize_name(pin.partition("==")[0]) not in left_out]
    path.write_text("\n".join([*comment, *kept]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
