"""The command line: a verb's options, its run and what it prints are one module."""

import os
import sys


def main() -> None:
    """Run the program `pic`."""
    if sys.platform == "win32":  # before what has no Windows form is imported, as file locks
        sys.exit("pic: error: Windows is not supported, as stores need POSIX's locks and permissions; use WSL")
    _open_closed_streams()
    # Read when torch loads OpenMP. Threads that wait spin else: beside other work that takes three to six times the CPU
    # seconds, and as much longer; on an idle machine the difference is within the noise.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from pictool.commands.app import run

    run()


def _open_closed_streams() -> None:
    """Open the standard streams that were closed (`>&-`), before another file gets their number.

    What is written to stderr is lost. Reading stdin and writing to stdout fail with EBADF, since the files that take
    their places are opened the other way.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_WRONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (as long as the process)
