"""The command line: a verb's options, its run and what it prints are one module."""

import os
import sys


def main() -> None:
    """Run the program `pic`."""
    if sys.platform == "win32":  # before what has no Windows form is imported, as file locks
        sys.exit("pic: error: Windows is not supported, as stores need POSIX's locks and permissions; use WSL")
    # Read when torch loads OpenMP. Threads that wait spin else: beside other work that takes three to six times the CPU
    # seconds, and as much longer; on an idle machine the difference is within the noise.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from pictool.commands.app import run

    run()
