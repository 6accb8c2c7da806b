"""examples/make under a real make: what is rebuilt when, in parallel, with nothing left of what fails.

Most runs of `pic` are answered by this process, which has its imports behind it; one test runs the program itself.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands.conftest import save
from commands.run import pic, write

EXAMPLE = Path(__file__).parents[2] / "examples" / "make"
PROGRAM = shutil.which("pic", path=str(Path(sys.executable).parent))
DOCUMENTS = {"docs/nukstead.kvo", "docs/rulholm.kvo", "docs/meno.kvo", "docs/sikdale.kvo"}
ANSWERS = {"answers/festival.jsonl", "answers/mayor.jsonl"}
ALL = DOCUMENTS | ANSWERS
CLIENT = """
import json, socket, sys
with socket.create_connection(("127.0.0.1", {port})) as line, line.makefile("rw") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
    file.flush()
    code, out, err = json.loads(file.readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        outcome = pic(*json.loads(self.rfile.readline()))
        self.wfile.write(json.dumps([outcome.code, outcome.out, outcome.err]).encode() + b"\n")


@pytest.fixture
def warm_pic(tmp_path: Path) -> Iterator[str]:
    """A program that is `pic`, run by this process, one call after the other."""
    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        client = write(tmp_path / "client.py", CLIENT.format(port=server.server_address[1]))
        yield shlex.join([sys.executable, "-S", "-E", str(client)])
        server.shutdown()


@dataclass(frozen=True)
class Project:
    """A copy of the example in the working directory, built with a tiny model."""

    pic: str
    model: Path

    def make(self, *arguments: str, model: Path | None = None) -> subprocess.CompletedProcess[str]:
        time.sleep(0.02)  # what the test has changed just now is newer than what was built before
        command = ["make", "-j4", f"PIC={self.pic}", f"MODEL={model or self.model}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def build(self, *arguments: str, model: Path | None = None) -> set[str]:
        """The targets that a successful make has built (or would build, with -n)."""
        done = self.make(*arguments, model=model)
        assert done.returncode == 0, done.stderr
        return set(re.findall(r" -o (\S+)", done.stdout))


@pytest.fixture
def project(warm_pic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    shutil.copytree(EXAMPLE, "project", ignore=shutil.ignore_patterns("*.kvo", "*.d", "answers", ".model", ".pic"))
    monkeypatch.chdir("project")
    return Project(warm_pic, save(tmp_path / "model", positions=1024))


def times() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}


def append(name: str, text: str) -> None:
    path = Path(name)
    path.write_text(path.read_text() + text)


def test_all_is_built_once(project: Project) -> None:
    assert project.build() == ALL
    assert all(json.loads(Path(f"answers/{name}.jsonl").read_text())["answer"] for name in ("festival", "mayor"))
    before = times()
    again = project.make()
    assert "Nothing to be done" in again.stdout and again.returncode == 0
    assert times() == before
    assert project.make("-q").returncode == 0


def test_only_the_answers_that_link_a_changed_document_are_asked_again(project: Project) -> None:
    project.build()
    before = {name: json.loads(Path(name).read_text()) for name in ANSWERS}
    append("docs/meno.txt", "He plays the harp.\n")
    assert project.build() == {"docs/meno.kvo"} | ANSWERS
    after = {name: json.loads(Path(name).read_text()) for name in ANSWERS}
    assert [name for name in ANSWERS if after[name] != before[name]] == ["answers/mayor.jsonl"]
    assert project.build() == set()
    append("queries/mayor.jsonl", "")
    assert project.build() == {"answers/mayor.jsonl"}


def test_another_model_rebuilds_all(project: Project, tmp_path: Path) -> None:
    project.build()
    other = Path(shutil.copytree(project.model, tmp_path / "other"))  # its files are not newer
    assert project.build("-n", model=other) == ALL
    assert project.build("-n") == set()  # asking has changed nothing
    assert project.build("docs/meno.kvo", model=other) == {"docs/meno.kvo"}
    assert project.build(model=other) == ALL - {"docs/meno.kvo"}
    assert project.build(model=other) == set()
    assert project.build() == ALL


def test_what_fails_leaves_no_target(project: Project) -> None:
    text = Path("docs/meno.txt").read_bytes()
    write("docs/meno.txt", b"\xff\xfe\0")
    failed = project.make("-k")
    assert failed.returncode == 2 and "pic: error: docs/meno.txt" in failed.stderr
    assert not Path("docs/meno.kvo").exists()
    assert not list(Path().rglob("*.tmp"))
    assert DOCUMENTS - {"docs/meno.kvo"} <= times().keys()
    write("docs/meno.txt", text)
    assert "docs/meno.kvo" in project.build() and times().keys() >= ALL


@pytest.mark.skipif(PROGRAM is None, reason="pic is not installed beside this Python")
def test_the_program_itself_in_parallel(project: Project) -> None:
    objects = {"docs/nukstead.kvo", "docs/rulholm.kvo"}
    assert Project(shlex.quote(str(PROGRAM)), project.model).build(*objects) == objects <= times().keys()
    assert project.build() == ALL - objects
