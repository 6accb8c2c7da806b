"""The command line: a verb's options, its run and what it prints are one module."""

import sys


def main() -> None:
    """Run the program `pic`."""
    if sys.platform == "win32":  # before what has no Windows form is imported, as file locks
        sys.exit("pic: error: Windows is not supported, as stores need POSIX's locks and permissions; use WSL")
    from pictool.commands.app import run

    run()
