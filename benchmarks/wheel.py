"""The wheel and the sdist in empty environments: `python -m benchmarks.wheel` (`make wheel`).

uv builds the sdist, and the wheel from it. The core alone, with each extra alone, and the sdist with [torch] are
installed without constraints: the newest that pyproject.toml allows. In each: every command's --help, an estimate, a
compile and a link (not in the core), what the extra is for, and one clear line for an extra that lacks. What the wheel
takes is measured, and what the core has to download: pip's own files, and no index's.

    python -m benchmarks.wheel --installers uv --extras core,serve --find-links DIR --out wheel.json
    python3.14 -m benchmarks.wheel --built DIR --installers pip --extras core,documents+serve+tui --out wheel.json

The second runs on another system, by its own Python, what `uv build --out-dir DIR` has built; rows are of a system.

It imports nothing but Python's own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE, SDIST, OF_DEVELOPERS = "core", "sdist", ("clients", "test", "dev")
EXTRAS = (CORE, SDIST, *(name for name in PROJECT["optional-dependencies"] if name not in OF_DEVELOPERS))
INCLUDES = {"ray": ("serve", "signed"), "mcp": ("documents", "signed")}  # what else an extra brings
LIMIT_S = 600.0  # of a command
LIMITS_MB = {"wheel_mb": 8.0, "download_mb": 60.0}  # the wheel, and what `pic estimate` needs beside Python
TEXT = "Gadwick holds the Vulry festival. It lies on the river Temmere.\n"
QUERY = "Which festival does Gadwick hold?"
# What ends with the line that names the extra, where it is not installed.
NEEDS = {
    "torch": ["link", "a.txt", "-q", QUERY],
    "eval": ["eval", "q.jsonl", "--algo", "naive", "-o", "results.jsonl"],
    "documents": ["ask", ".", "-q", QUERY],
    "tui": ["tui"],
    "serve": ["serve", "--port", "0"],
    "mcp": ["mcp", "."],
    "signed": ["store", "sign"],
    "ray": ["compile", "a.txt", "--ray", "local", "--remote", "remote"],
}
# What it does where it is installed, if not the same command: Python that runs in the folder.
WORKS = {
    "tui": """
import asyncio
from pictool.commands.settings.settings import read_settings
from pictool.commands.tui import open_app
from pictool.commands.tui_process.job import WorkerJob
async def show():
    with WorkerJob(read_settings()) as job:
        async with open_app((), read_settings(), job).run_test() as pilot:
            await pilot.pause()
asyncio.run(show())
""",
    "serve": """
import json, re, subprocess, sys, time, urllib.request
from pathlib import Path
with open("said.txt", "wb") as said:
    server = subprocess.Popen([sys.executable, "-m", "pictool", "serve", "--port", "0"], stdout=said, stderr=said)
try:
    while not (found := re.search(r"http://[0-9.]+:[0-9]+", Path("said.txt").read_text())):
        assert server.poll() is None, Path("said.txt").read_text()
        time.sleep(0.2)
    body = json.dumps({"model": "embedded", "prompt": "Gadwick", "max_tokens": 2}).encode()
    request = urllib.request.Request(found[0] + "/v1/completions", body, {"Content-Type": "application/json"})
    while True:
        try:
            print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
            break
        except urllib.error.URLError as error:
            assert server.poll() is None and getattr(error, "code", 503) == 503, error
            time.sleep(0.2)
finally:
    server.terminate()
    server.wait(60)
""",
    "otel": """
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
from pictool.serve.tracing import make_provider
assert make_provider() is not None
os._exit(0)
""",
    "quantized": "import accelerate, compressed_tensors",
    "torchao": "import torchao",
    "llamacpp": """
import llama_cpp
import pictool.engines.llamacpp.engine
print(llama_cpp.llama_print_system_info())
""",
    "structured": """
from pictool.runtime.chat.schemas import require_schema
require_schema('{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}')
""",
}
HELP = """
import sys
from pictool.commands import main
from pictool.commands.app import COMMANDS
for name in COMMANDS:
    sys.argv = ["pic", name, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, name
"""
INITIALIZE = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "wheel", "version": "1"}},
}  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel and some extras, and a folder to work in."""

    python: Path
    folder: Path
    extras: tuple[str, ...]

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        home = {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder)}
        try:
            return subprocess.run(
                [str(self.python.with_name(command[0])), *command[1:]], cwd=self.folder, capture_output=True, text=True,
                input=stdin, env=os.environ | home, timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"did not end in {LIMIT_S:.0f} s")

    def problems(self) -> Iterator[str]:
        """What is wrong in it."""
        (self.folder / "a.txt").write_text(TEXT, encoding="utf-8")
        record = {"documents": ["a.txt"], "query": QUERY, "answers": ["Vulry"]}
        (self.folder / "q.jsonl").write_text(json.dumps(record), encoding="utf-8")
        (self.folder / "b.html").write_text(f"<p>{TEXT}</p>", encoding="utf-8")
        (self.folder / "log.jsonl").write_text(json.dumps({"prompt": TEXT}) + "\n", encoding="utf-8")
        yield from self._failed("python", "-P", "-c", HELP)
        commands = [["--version"], ["estimate", "log.jsonl"]]
        if self.extras != (CORE,):
            commands += [["compile", "a.txt"], ["link", "a.txt", "-q", QUERY, "--trace", "a.trace"]]
        for command in commands:
            yield from self._failed("pic", *command)
        for extra in self.extras:
            yield from self._feature(extra)
        have = {each for extra in self.extras for each in (extra, *INCLUDES.get(extra, ()))}
        have |= {"torch"} if self.extras != (CORE,) else set()
        for extra in NEEDS.keys() - have:
            done = self.run("pic", *NEEDS[extra])
            last = (done.stderr.strip().splitlines() or [""])[-1].replace('"', "'")
            named = last.removesuffix("]'").rpartition("; pip install 'pictool[")[2]
            if done.returncode != 1 or named not in {extra, "torch"} - have or done.stderr.count("pic: error:") != 1:
                yield f"pic {' '.join(NEEDS[extra])}: does not name [{extra}]: exit code {done.returncode}: {last}"

    def _feature(self, extra: str) -> Iterator[str]:
        """What an extra is for."""
        if extra == "mcp":
            done = self.run("pic", *NEEDS["mcp"], stdin=json.dumps(INITIALIZE) + "\n")
            if "serverInfo" not in done.stdout:
                yield f"pic mcp: did not answer: {done.stdout[-200:]} {done.stderr[-300:]}"
        elif extra in WORKS:
            yield from self._failed("python", "-P", "-c", WORKS[extra])
        elif extra in NEEDS:
            yield from self._failed("pic", *NEEDS[extra])

    def _failed(self, *command: str) -> Iterator[str]:
        done = self.run(*command)
        if done.returncode or "Traceback" in done.stderr:
            yield f"{' '.join(command)[:120].strip()}: exit code {done.returncode}: {done.stderr[-300:]}"


def installing(installer: str, python: Path, *more: str) -> list[str]:
    """A command that installs into an environment."""
    program = [str(python), "-m", "pip", "install"]
    if installer == "uv":
        program = [sys.executable, "-m", "uv", "pip", "install", "--python", str(python)]
    return [*program, "--quiet", *more]


def install(installer: str, directory: Path, built: Path, extra: str, find_links: str | None) -> tuple[Path, str]:
    """Make an environment with the wheel, or the sdist, of a directory: its Python, and why that failed."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    (file,) = built.glob("pictool-*.tar.gz" if extra == SDIST else "pictool-*.whl")
    named = {CORE: str(file), SDIST: f"{file}[torch]"}.get(extra, f"{file}[{extra.replace('+', ',')}]")
    more = [] if find_links is None else ["--find-links", find_links]
    done = subprocess.run(installing(installer, python, *more, named), stderr=subprocess.PIPE, text=True)
    return python, done.stderr[-300:] if done.returncode else ""


def sizes(python: Path, built: Path, scratch: str) -> dict[str, float]:
    """Megabytes of the wheel, of all that the core downloads, and of what that takes on the disk, without pip."""
    (wheel,) = built.glob("pictool-*.whl")
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        subprocess.run([str(python), "-m", "pip", "download", "--quiet", "--dest", place, str(wheel)], check=True)
        download = sum(file.stat().st_size for file in Path(place).iterdir())
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    files = [file for file in packages.rglob("*") if file.is_file() and "pip" not in file.relative_to(packages).parts]
    found = {"wheel": wheel.stat().st_size, "download": download, "disk": sum(file.stat().st_size for file in files)}
    return {f"{name}_mb": round(size / 1e6, 1) for name, size in found.items()}


def check(installer: str, extra: str, built: Path, scratch: str, find_links: str | None) -> dict[str, Any]:
    """Install one, and try it: what is wrong, the versions, and the seconds that both took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        (folder := Path(place, "work")).mkdir()
        python, failed = install(installer, Path(place, "venv"), built, extra, find_links)
        installed = time.monotonic()
        environment = Environment(python, folder, tuple(extra.split("+")))
        problems = [f"cannot be installed: {failed}"] if failed else list(environment.problems())
        version = [] if failed else environment.run("pic", "--version").stdout.splitlines()
        tested = time.monotonic()
        taken = sizes(python, built, scratch) if extra == CORE and not failed else {}
    problems += [
        f"{name}: {taken[name]}, not {most} at most" for name, most in LIMITS_MB.items() if taken.get(name, 0) > most
    ]
    print(f"{installer}, {extra}: {len(problems) or 'no'} problems", *problems, sep="\n  ", flush=True)
    return {
        "installer": installer, "extra": extra, "python": platform.python_version(), "system": system(),
        "problems": problems, "version": version, "install_s": round(installed - started),
        "tests_s": round(tested - installed), **taken,
    }  # fmt: skip


def system() -> str:
    """The system and its version, as it names itself."""
    return platform.freedesktop_os_release()["PRETTY_NAME"]


def key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["system"], row["python"], row["installer"], row["extra"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installers", default="pip,uv", help="with commas (default: %(default)s)")
    parser.add_argument("--extras", default=",".join(EXTRAS), help="with commas; joined by + in one environment")
    parser.add_argument("--find-links", help="wheels that installers may take")
    parser.add_argument("--built", type=Path, help="a directory with the wheel and the sdist; else uv builds them")
    parser.add_argument("--out", type=Path, help="results file, which keeps the other rows")
    options = parser.parse_args()
    results: dict[str, Any] = {"commands": [], "results": []}
    if options.out is not None and options.out.exists():
        results = json.loads(options.out.read_text(encoding="utf-8"))
    arguments = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    results["commands"] = sorted({*results["commands"], " ".join(["python -m benchmarks.wheel", *arguments])})
    num_bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        built = options.built or Path(scratch, "built")
        if options.built is None:
            subprocess.run(
                [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(built), str(ROOT)], check=True
            )
        for installer in options.installers.split(","):
            for extra in options.extras.split(","):
                row = check(installer, extra, built, scratch, options.find_links)
                results["results"] = [old for old in results["results"] if key(old) != key(row)] + [row]
                num_bad += len(row["problems"])
                if options.out is not None:
                    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if num_bad else 0)


if __name__ == "__main__":
    main()
