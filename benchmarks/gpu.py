"""Everything that needs a GPU, in one command that ends within 9 minutes: `make gpu`.

    make gpu                              all parts; results go to gpu-results/
    make gpu PART=exact OUT=/tmp/results  one part
    make gpu-wheels                       on a machine with a network: what `make gpu` installs on one without
    PIC_GPU_REHEARSAL=1 make gpu          all parts on the CPU, at tiny shapes

It needs Python with torch and transformers, and neither a network nor pip: packages that are missing are unpacked from
`.gpu-wheels/` into a directory of their own. Every part runs in a process of its own with a time limit, and
`summary.json` is written after each, so that a run that is cut leaves what it had. Exit code 1 if a part failed.
Imports nothing but the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".gpu-wheels"
TOTAL_S = 530  # of all parts
REHEARSAL = "PIC_GPU_REHEARSAL"
# On the machine already, with what they need in turn; wheels of them are large.
GIVEN = ("torch", "transformers", "numpy", "tokenizers", "huggingface-hub")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "psutil")
NEEDED = ("pictool[torch]", *TOOLS)
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014", "manylinux_2_5",
             "manylinux1")  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One part: the command that follows `python`, and the seconds after which it is ended."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()


def parts() -> list[Part]:
    """All parts, in the order in which they matter."""
    module = ("-m", "benchmarks.gpu_parts")
    workers = str(min(8, (os.cpu_count() or 1) // 2)) if not os.environ.get(REHEARSAL) else "0"
    checks = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, "tests/on_device/checks.py")
    return [
        Part("exact", checks, 200),
        Part("doctor", (*module, "doctor"), 60),
        Part("shape", (*module, "shape"), 80),
        Part("bench-context", (*module, "bench-context"), 200),
        Part("bench-sync", (*module, "bench-sync"), 80),
        Part("bench-breakdown", (*module, "bench-breakdown"), 80),
        Part("kinds", (*module, "kinds"), 120),
        # torch's own sanitizer of races between streams; it traces every kernel, so it is slow
        Part("race", (*module, "race"), 60, () if os.environ.get(REHEARSAL) else (("TORCH_CUDA_SANITIZER", "1"),)),
        Part("links", (*module, "links"), 480),
    ]


@dataclass(frozen=True)
class Outcome:
    """How a part ended. `tail` is the end of what it printed."""

    part: str
    state: str  # passed, failed, "ended after … s" or "left out"
    seconds: float
    tail: str


def run_parts(chosen: Sequence[Part], out: Path) -> list[Outcome]:
    """Run parts one after another, and write down after each how it ended."""
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PIC_GPU_OUT": str(out), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    found = [str(install_missing()), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in found if path)
    outcomes: list[Outcome] = []
    started = time.monotonic()
    for part in chosen:
        left_s = TOTAL_S - (time.monotonic() - started)
        outcome = _run(part, min(part.limit_s, left_s), environment, out) if left_s > 5 else _left_out(part)
        outcomes.append(outcome)
        (out / "summary.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
        print(f"gpu: {outcome.part}: {outcome.state} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.state != "passed":
            print(outcome.tail, flush=True)
    return outcomes


def _run(part: Part, limit_s: float, environment: dict[str, str], out: Path) -> Outcome:
    started = time.monotonic()
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n=== {part.name}\n")
        log.flush()
        begin = log.tell()
        command = [sys.executable, *part.command]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment | dict(part.environment), stdout=log, stderr=subprocess.STDOUT,
                timeout=limit_s, check=False,
            )  # fmt: skip
            state = "passed" if done.returncode == 0 else f"failed with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            state = f"ended after {limit_s:.0f} s"
    with (out / "log.txt").open("rb") as log_file:
        log_file.seek(begin)
        printed = log_file.read().decode(errors="replace")
    return Outcome(part.name, state, time.monotonic() - started, "\n".join(printed.splitlines()[-25:]))


def _left_out(part: Part) -> Outcome:
    return Outcome(part.name, "left out: no time is left", 0.0, "")


# Packages


def install_missing() -> Path:
    """Unpack the wheels of what is missing here, if there are any (no pip is needed); returns the directory."""
    target = Path(tempfile.gettempdir()) / f"pic-gpu-packages-{os.getuid()}"
    for path in sorted(WHEELS.glob("*.whl")):
        if _is_missing(path.name.split("-")[0]):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(target)
    return target


def _is_missing(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return True
    return False


def download_wheels(python_version: str, machine: str) -> None:
    """Download what pictool and its tests need beside torch and transformers, in the versions installed here."""
    names = sorted(_needed(NEEDED) - {_canonical(name) for name in GIVEN} - {"pictool"})
    pinned = [f"{name}=={version(name)}" for name in names]
    platforms = [argument for each in PLATFORMS for argument in ("--platform", f"{each}_{machine}")]
    pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    WHEELS.mkdir(exist_ok=True)
    for wheel in WHEELS.glob("*.whl"):  # of versions before
        wheel.unlink()
    subprocess.run(
        [sys.executable, *pip, "--python-version", python_version, *platforms, "--dest", str(WHEELS), *pinned],
        check=True,
    )  # fmt: skip
    size = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    print(f"{len(pinned)} wheels of {size / 1e6:.1f} MB are in {WHEELS.name}/")


def _needed(roots: Sequence[str]) -> set[str]:
    """The packages that these require, themselves among them; not those that the given ones require in turn."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        each = waiting.pop()
        name = _canonical(each.name)
        if name in found or name in GIVEN:
            continue
        found.add(name)
        for required in map(Requirement, requires(each.name) or ()):
            extras = ("", *each.extras)
            if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(required)
    return found


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are named, or all of them; or download wheels. Returns the exit code."""
    known = {part.name: part for part in parts()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--part", action="append", choices=known, help="a part; repeatable (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results", help="directory of the results")
    parser.add_argument("--download-wheels", action="store_true", help="fill .gpu-wheels/ instead; needs a network")
    parser.add_argument("--python-version", default="3.12", help="of the machine that wheels are for")
    parser.add_argument("--machine", default="x86_64", help="its architecture")
    options = parser.parse_args(arguments)
    if options.download_wheels:
        download_wheels(options.python_version, options.machine)
        return 0
    outcomes = run_parts([known[name] for name in options.part or known], options.out.resolve())
    return int(any(outcome.state != "passed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
