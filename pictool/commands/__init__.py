"""The command line: a verb's options, its run and what it prints are one module."""


def main() -> None:
    """Run the program `pic`."""
    from pictool.commands.app import run

    run()
