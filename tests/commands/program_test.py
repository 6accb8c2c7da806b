"""The program as a shell runs it: streams, signals, and what it imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from terminal import open_terminal
from write_reference import commands_of, common_options, option_rows

import pictool
from commands.conftest import TEXT
from commands.run import Objects, write
from pictool.commands import removed
from pictool.commands.app import COMMANDS
from pictool.commands.console import progress
from pictool.commands.console.errors import OF_TORCH
from pictool.store.files import LOCK, locked
from pictool.store.store import Store

ROOT = Path(__file__).parents[2]
MOST_COMMANDS, MOST_OPTIONS = 24, 151
PIC = (sys.executable, "-c", "from pictool.commands import main; main()")


def run(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    command = [*PIC, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload, no-any-return]


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    done = run("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert [
        name for name in ("compile", "link", "inspect", "store") if not re.search(rf"\b{name}  ", done.stdout)
    ] == []
    heavy = "import sys, pictool.commands.app; print({'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "closed", "code", "told"),
    [
        (["-q", "config"], ">&-", 1, "stdout"), (["--help"], ">&-", 1, "stdout"), (["-q", "config"], "<&-", 0, ""),
        (["query", "-"], "<&-", 1, "stdin"), (["-q", "config"], "2>&-", 0, ""),
        (["-q", "config"], ">&- 2>&- <&-", 1, ""),
    ],
)  # fmt: skip
def test_closed_streams(arguments: list[str], closed: str, code: int, told: str) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *PIC, *arguments]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and (("store" in done.stdout) == (code == 0))
    assert told in done.stderr and done.stderr.count("\n") == bool(told)


def test_what_has_left_is_one_line_that_names_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "REMOVED", {"gone": "A", "store gone": "B", "link --gone": "C"})
    for arguments, instead in (
        ("gone a --help", "A"), ("-q gone", "A"), ("store gone", "B"), ("link x --gone=3", "C"),
        ("store gone2", None), ("store --gone", None), ("link -- --gone", None), ("link gone", None),
    ):  # fmt: skip
        named = removed.replacement(arguments.split())
        assert (named and named.rpartition(" ")[2]) == instead


def test_the_program_names_the_replacement() -> None:
    for named in (next(iter(removed.REMOVED)), "evidence"):
        done = run(*named.split())
        assert (
            done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith(f"pic: error: {named}: ")
        )
    assert all(str(removed.replacement(named.split())).startswith(f"{named}: ") for named in removed.REMOVED)


def test_what_replaces_a_thing_that_has_left_is_there() -> None:
    for named in removed.REMOVED:
        command = named.split()[0]
        for word, following in pairwise([*str(removed.replacement(named.split())).split(": ", 1)[1].split(), ""]):
            command = following if word == "pic" else command
            assert f"{command} {word.strip(',;()')}" not in {*removed.REMOVED} - {named}, named


def test_commands_and_options_are_few() -> None:
    """An option that commands of a group, or all that have it, share under one meaning counts once."""
    num_commands = sum(len(commands_of(name)) for name in COMMANDS)
    num_common = common_options("").count("\n") - 2  # rows of a table below its head
    num_options = num_common + sum(len(list(option_rows(name))) for name in COMMANDS)
    assert num_commands <= MOST_COMMANDS and num_options <= MOST_OPTIONS


@pytest.mark.parametrize(("own", "policy"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_that_wait_do_not_spin_unless_the_user_says_so(own: dict[str, str], policy: str) -> None:
    """OpenMP reads it once, when torch loads it."""
    code = """if True:
        import os, sys
        import pictool.commands.app as app
        app.run = lambda: print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
        from pictool.commands import main
        main()
    """
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | own
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == f"{policy} False\n"


def test_inspect_and_store_import_no_torch(objects: Objects) -> None:
    for arguments in (["inspect", str(objects.mine)], ["store", "verify", "--store", str(objects.store)]):
        run_app = f"import sys; from pictool.commands.app import app\ntry: app({arguments!r})"
        code = f"{run_app}\nfinally: print('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("False\n")


WITHOUT_TORCH = """
import sys
from pictool.commands import main
from pictool.commands.console.errors import OF_TORCH
class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, *more): return None if name in OF_TORCH else self.finder.find_spec(name, *more)
sys.meta_path[:] = map(Without, sys.meta_path)
main()
"""


@pytest.mark.parametrize("arguments", ["link a.txt -q Who?", "compile a.txt", "doctor", "estimate log -m m"])
def test_what_needs_torch_says_so_in_a_line_where_it_is_not_installed(arguments: str, model: Path) -> None:
    write("a.txt", TEXT)
    write("log", json.dumps({"prompt": TEXT}))
    program = [sys.executable, "-c", WITHOUT_TORCH, *arguments.replace(" m", f" {model}").split(" ")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pic: error: ") and done.stderr.endswith("; pip install 'pictool[torch]'\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["estimate log", "-q config", "--version", "--help", "link --help"])
def test_what_a_log_would_gain_needs_no_torch(arguments: str) -> None:
    write("log", "\n".join([json.dumps({"prompt": TEXT})] * 3))
    program = [sys.executable, "-c", WITHOUT_TORCH, *arguments.split()]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_the_extra_torch_is_what_the_program_says_it_is() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    modules = {re.split(r"[\[>]", each)[0].replace("-", "_") for each in extra["torch"]}
    assert modules == OF_TORCH
    whole = {name for name, packages in extra.items() if packages[0].startswith("pictool[")}
    assert whole == extra.keys() - {"torch", "clients"}


def test_a_model_s_mistake_is_one_line(model: Path) -> None:
    """The libraries underneath have a lot to say of such a model; none of it is shown."""
    directory = Path(shutil.copytree(model, "other"))
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    done = run("compile", write("a.txt", TEXT), "-m", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pic: error: other: ") and done.stderr.count("\n") == 1


def heed_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupted_command_ends_although_a_thread_never_does() -> None:
    code = """
import signal, sys, threading
from pictool.commands import app, main

def command():
    threading.Thread(target=threading.Event().wait).start()
    print("pic: interrupted", file=sys.stderr)
    sys.exit(130)

app.app, app.GRACE_S = command, 0.1
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "pic: interrupted\n")


def test_an_interrupt_while_the_program_ends_is_no_traceback() -> None:
    """Counts are written then; a signal that a handler of Python's gets there is a traceback, and changes nothing."""
    at_exit = "import atexit, os; atexit.register(lambda: os.kill(os.getpid(), 2))"
    code = f"{at_exit}; import sys; sys.argv = ['pic', '--version']; from pictool.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, preexec_fn=heed_interrupts
    )
    assert done.returncode == -signal.SIGINT and done.stderr == "" and done.stdout.startswith("pic ")


def test_an_interrupted_program_says_so() -> None:
    Store(Path("st")).ensure_store()
    with locked(Path("st") / LOCK):  # gc waits for it
        process = subprocess.Popen(
            [*PIC, "store", "gc", "--store", "st"], stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
        )
        for _ in range(60):  # between opening the file and waiting for it, a signal may come too early to end that
            time.sleep(0.5)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
                break
            if has_open(process.pid, LOCK):
                process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "pic: interrupted\n")


def has_open(pid: int, name: str) -> bool:
    """Whether a process has a file of this name open."""
    with suppress(OSError):  # it has ended, or closed one meanwhile
        return any(file.readlink().name == name for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_a_reader_that_goes_away_is_no_error(objects: Objects) -> None:
    process = subprocess.Popen(
        [*PIC, "store", "ls", "--store", str(objects.store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "Broken" not in process.stderr.read() and process.wait(60) == 1
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_results_that_cannot_be_written_are_an_error(objects: Objects) -> None:
    with Path("/dev/full").open("w") as full:
        command = [*PIC, "store", "ls", "--store", str(objects.store), "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "pic: error: input or output: No space left on device\n"


def test_a_name_that_the_terminal_cannot_show_is_escaped(objects: Objects) -> None:
    path = Path(shutil.copy(objects.mine, os.fsdecode(b"\xff\xe6.kvo")))
    done = run("inspect", os.fsencode(path).decode("utf-8", "surrogateescape"), env={**os.environ, "PYTHONUTF8": "1"})
    assert done.returncode == 0 and "\\udcff" in done.stdout


def test_python_m_pictool_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "pictool", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"pic {pictool.__version__}")


def test_on_a_terminal_nothing_is_said_but_by_pic(model: Path) -> None:
    """The libraries underneath warn on a terminal of what they do not without one; lines that wait go."""
    write("a.txt", TEXT)
    shown = on_a_terminal(*PIC, "link", "a.txt", "-q", "why?", "-m", model, "--max-new-tokens", 2)
    lines = [line.split("\r\x1b[K")[-1].rstrip("\r") for line in shown.split("\n")]
    notes = [line for line in lines if line.startswith("pic: ")]
    assert [line for line in notes if "rows recomputed" in line] and "pic: compiled first: a.txt (40 tokens)" in notes
    assert len(lines) <= len(notes) + 3  # the answer, and ends of lines


def on_a_terminal(*command: object) -> str:
    """What a command shows on a terminal of its own."""
    terminal, follower = open_terminal()
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    shown = b""
    with suppress(OSError):  # the end of a terminal is an error
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    assert process.wait() == 0, shown.decode()
    return shown.decode()


def test_a_bar_on_a_terminal_has_no_literal_escapes(model: Path) -> None:
    """Loading weights is said in a line that goes, which a bar does not redraw."""
    write("a.txt", TEXT), write("b.txt", TEXT * 2)
    code = (
        "import pictool.commands.console.verbosity as v; v._PATIENCE_S = 0; from pictool.commands import main; main()"
    )
    shown = on_a_terminal(sys.executable, "-c", code, "compile", "a.txt", "b.txt", "-m", model)
    assert "compiling" in shown and "\\x1b" not in shown


def test_work_that_takes_long_is_told_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_NOTE_S", 0.0)
    with progress.progress("compiling", 2) as advance:
        advance(100)
        advance()
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"pic: compiling: 50%, 1 of 2, [\d,]+ tokens/s", first)
    assert re.fullmatch(r"pic: compiling: 100%, 2 of 2, [\d,]+ tokens/s", second)


def test_windows_is_refused_by_name_before_anything_is_imported() -> None:
    code = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; from pictool.commands import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("pic: error: Windows is not supported")
