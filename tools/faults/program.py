"""`pic` in forks of a process that has imported everything and loaded the model: a run in milliseconds, not seconds.

A fork ends as a program ends (threads are joined, what is registered for the exit runs, output is flushed), so that
faults at its end count, too.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import pkgutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from commands.run import pic

from faults.shim import Fault, Shim

LIMIT_S = 60  # of a run; one that takes longer hangs


@dataclass(frozen=True)
class Command:
    """A command line of `pic` below the working directory, with its environment."""

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.environment), "pic", *self.arguments])


@dataclass(frozen=True)
class Ended:
    """How a run ended: `code` is its exit code, or less than 0 the signal that killed it."""

    code: int
    out: str
    err: str
    seconds: float


def warm_up(directory: Path, scratch: Path) -> None:
    """Import all that a command could, and load the model of `directory`, so that forks need not."""
    import pictool

    for module in pkgutil.walk_packages(pictool.__path__, "pictool."):
        if not module.name.startswith(
            ("pictool.engines.vllm", "pictool.runtime.kernels.", "pictool.tui", "pictool.__main__")
        ):
            importlib.import_module(module.name)
    torch.set_num_threads(1)  # what a fork inherits of other threads, it cannot use
    _reuse_model(directory)
    scratch.mkdir()
    text, more = scratch / "text.txt", ("-m", directory, "--store", scratch / "store")
    text.write_text("Whatever is imported and set up at first use is there afterwards.\n")
    for line in (
        ("compile", text, *more, "--codec", "int8"),
        ("link", text, "-q", "Who?", "--max-new-tokens", 2, "--algo", "cacheblend", *more),
        ("store", "ls", "--store", scratch / "store"),
    ):
        assert pic(*line).code == 0
    gc.freeze()  # a collection in a fork then copies nothing of it


def warm_up_slow() -> None:
    """Import also what few commands need."""
    importlib.import_module("scipy.stats")
    gc.freeze()


def _reuse_model(directory: Path) -> None:
    """Let `load_model` of this directory return the model that is loaded here, in its salt."""
    from pictool.runtime import model as models

    load, warm = models.load_model, models.load_model(str(directory), "cpu")
    names = ("fingerprint", "target", "module", "eos_ids", "_files", "_state")
    known = {name: getattr(warm, name) for name in names}

    def load_model(name: str | None = None, device: str = "auto", dtype: str = "auto", salt: str = "") -> Any:
        if name != str(directory) or dtype != "auto":
            return load(name, device, dtype, salt)
        model = models.Model(name, warm.config, warm.tokenizer, "cpu", warm.dtype, directory, salt=salt)
        vars(model).update(known)
        return model

    models.load_model = load_model


class Running:
    """A fork that runs a command in a directory; its faults are those that the shim was set to, if it is armed."""

    def __init__(self, command: Command, directory: Path, output: Path, shim: Shim | None = None) -> None:
        sys.stdout.flush(), sys.stderr.flush()
        self._output, self._begun = output, time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _redirect(directory, output)
                _end_as_program(lambda: _run(command, shim))
            finally:
                os._exit(99)

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        status = os.waitpid(self.pid, 0)[1]
        out, err = (self._output.with_suffix(kind).read_text(errors="replace") for kind in (".out", ".err"))
        return Ended(os.waitstatus_to_exitcode(status), out, err, time.monotonic() - self._begun)


def run(command: Command, directory: Path, output: Path, shim: Shim | None = None, fault: Fault = Fault()) -> Ended:
    """Run a command in a directory, and wait for its end; `output` names the files of what it prints."""
    if shim is not None:
        shim.set(directory, fault)
    return Running(command, directory, output, shim).wait()


def _redirect(directory: Path, output: Path) -> None:
    """Leave all that is the parent's: its streams, its working directory, what it runs at its end."""
    atexit._clear()  # type: ignore[attr-defined]
    finalizers: Any = weakref.finalize
    finalizers._registry.clear()
    finalizers._registered_with_atexit = False
    for fd, kind in ((1, ".out"), (2, ".err")):
        file = os.open(output.with_suffix(kind), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, fd)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.stderr)
    os.chdir(directory)


def _run(command: Command, shim: Shim | None) -> None:
    os.environ.update(command.environment)
    sys.argv = ["pic", *command.arguments]
    from conversing import converse

    from pictool.commands import main

    if shim is not None:
        shim.arm()
    (converse if command.arguments[0] == "converse" else main)()


def _end_as_program(main: Callable[[], None]) -> NoReturn:
    """Call `main`, and end this process as the interpreter would."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
