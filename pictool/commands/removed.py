"""What earlier versions had, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

# Commands, subcommands and options as they were typed; an option without a command is that of every one.
REMOVED: dict[str, str] = {
    "tui --server": "GET /health says how a server is, and Prometheus reads /metrics",
}


def replacement(arguments: Sequence[str]) -> str | None:
    """A line that names what to use in place of what these arguments still ask for; None if they do not."""
    words = [word.partition("=")[0] for word in arguments]
    while words and words[0].startswith("-"):  # options of the program itself
        words.pop(0)
    options = words[: words.index("--")] if "--" in words else words
    for removed, instead in REMOVED.items():
        *command, name = removed.split()
        given = options if name.startswith("-") else words[len(command) : len(command) + 1]
        if words[: len(command)] == command and name in given:
            return f"{removed}: is no longer there; {instead}"
    return None
