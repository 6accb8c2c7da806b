"""What earlier versions had, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

# Commands, subcommands and options, each after its command.
REMOVED: dict[str, str] = {
    "link --guarantee": "use --verify with --max-kl",
    "link --verify-share": "use --verify with --max-kl",
    "query --plot": "use --explain, which prints both trees",
    "serve --guarantee": "ask for verify in a share of the requests, or verify a batch: pic link --batch --verify",
    "serve --verify-share": "ask for verify in a share of the requests, or verify a batch: pic link --batch --verify",
    "serve --reuse-parts": "compile the parts themselves: pic compile --chunk-tokens",
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
