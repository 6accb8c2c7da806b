"""The wheel and the sdist in empty environments: `python -m benchmarks.wheel` (`make wheel`).

uv builds the sdist, and the wheel from it. The core alone (from the wheel, and from the sdist), and with each extra
alone, is installed by pip and by uv without constraints: the newest that pyproject.toml allows. In each: every
command's --help, a compile, a link, and one clear line for an extra that lacks.

    python -m benchmarks.wheel --installers uv --extras core,serve --find-links DIR

It imports nothing but Python's own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE, SDIST, OF_DEVELOPERS = "core", "sdist", ("clients", "test", "dev")
EXTRAS = (CORE, SDIST, *(name for name in PROJECT["optional-dependencies"] if name not in OF_DEVELOPERS))
INCLUDES = {"tui": ("plot",), "ray": ("serve",)}  # what else an extra brings
TEXT = "Gadwick holds the Vulry festival. It lies on the river Temmere.\n"
# What ends with the line that names the extra, where it is not installed.
NEEDS = {
    "eval": ["eval", "world", "-p", "prompts=2", "--algo", "naive", "-o", "results.jsonl"],
    "plot": ["inspect", "a.trace", "--plot", "picture.png"],
    "tui": ["tui"],
    "serve": ["serve", "--port", "0"],
    "ray": ["compile", "a.txt", "--ray", "local", "--remote", "remote"],
    "signed": ["store", "key", "new", "--force"],
}
RUN_WITH = ("eval", "plot", "signed")  # of these, what ends by itself


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel and one extra, and a folder to work in."""

    python: Path
    folder: Path
    extra: str

    def pic(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python.with_name("pic")), *arguments]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder)},
        )  # fmt: skip

    def problems(self) -> Iterator[str]:
        """What is wrong in it."""
        (self.folder / "a.txt").write_text(TEXT, encoding="utf-8")
        listed = "import pictool.commands.app as app; print(*app.COMMANDS)"
        names = subprocess.run([str(self.python), "-P", "-c", listed], capture_output=True, text=True).stdout.split()
        link = ["link", "a.txt", "-q", "Which festival does Gadwick hold?", "--trace", "a.trace"]
        for command in (["--version"], *([name, "--help"] for name in names), ["compile", "a.txt"], link):
            done = self.pic(*command)
            if done.returncode or "Traceback" in done.stderr:
                yield f"pic {' '.join(command)}: exit code {done.returncode}: {done.stderr[-300:]}"
        for extra, command in NEEDS.items():
            yield from self._problem_with(extra, command)

    def _problem_with(self, extra: str, command: Sequence[str]) -> Iterator[str]:
        is_there = extra in (self.extra, *INCLUDES.get(self.extra, ()))
        if is_there and extra not in RUN_WITH:
            return
        done = self.pic(*command)
        last = done.stderr.strip().splitlines()[-1:] or [""]
        if is_there and done.returncode:
            yield f"pic {' '.join(command)}: exit code {done.returncode}: {last[0]}"
        says = last[0].startswith("pic: error:") and f"pip install 'pictool[{extra}]'" in last[0].replace('"', "'")
        if not is_there and (done.returncode != 1 or not says or "Traceback" in done.stderr):
            yield f"pic {' '.join(command)}: does not name [{extra}]: exit code {done.returncode}: {last[0]}"


def install(installer: str, directory: Path, built: Path, extra: str, find_links: str | None) -> Path:
    """Make an environment with the wheel, or the sdist, of a directory; returns its Python."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    (file,) = built.glob("pictool-*.tar.gz" if extra == SDIST else "pictool-*.whl")
    named = str(file) if extra in (CORE, SDIST) else f"{file}[{extra}]"
    more = [] if find_links is None else ["--find-links", find_links]
    program = [str(python), "-m", "pip", "install", "--quiet"]
    if installer == "uv":
        program = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*program, *more, named], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installers", default="pip,uv", help="with commas (default: %(default)s)")
    parser.add_argument("--extras", default=",".join(EXTRAS), help="with commas (default: %(default)s)")
    parser.add_argument("--find-links", help="wheels that installers may take")
    options = parser.parse_args()
    num_bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch, "built")
        subprocess.run([sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(built), str(ROOT)], check=True)
        for installer in options.installers.split(","):
            for extra in options.extras.split(","):
                with tempfile.TemporaryDirectory(dir=scratch) as place:
                    (folder := Path(place, "work")).mkdir()
                    python = install(installer, Path(place, "venv"), built, extra, options.find_links)
                    found = list(Environment(python, folder, extra).problems())
                num_bad += len(found)
                print(f"{installer}, {extra}: {len(found) or 'no'} problems", *found, sep="\n  ", flush=True)
    sys.exit(1 if num_bad else 0)


if __name__ == "__main__":
    main()
