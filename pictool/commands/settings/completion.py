"""What the shell offers for a value on the command line. Where nothing fits, it offers files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import typer

from pictool.commands.console.verbosity import Verbosity, set_verbosity
from pictool.reading import with_home

_MOST_KEYS = 256


def complete_algo(incomplete: str) -> list[str]:
    """The names of policies."""
    from pictool.linker.policies import policies

    return [name for name in policies() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """The embedded models, and directories of models."""
    from pictool.runtime.model import EMBEDDED

    folder, _, beginning = incomplete.rpartition("/")
    parent = with_home(folder or ("/" if incomplete.startswith("/") else "."))
    found = []
    with suppress(OSError):
        found = sorted(entry.name for entry in parent.iterdir() if (entry / "config.json").is_file())
    lead = incomplete.removesuffix(beginning)
    return [name for name in [*EMBEDDED, *(lead + name for name in found)] if name.startswith(incomplete)]


def complete_key(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Keys of the store as `pic store ls` shows them, and what they were made of; none before a digit is written."""
    from pictool.commands.settings.settings import read_settings
    from pictool.errors import PicError
    from pictool.store.entries import DEFAULT_ROOT
    from pictool.store.sources import read_sources

    if not incomplete or not set(incomplete) <= set("0123456789abcdef"):
        return []
    set_verbosity(Verbosity.QUIET)  # notes would stand on the command line
    with suppress(PicError, OSError):
        root = Path(read_settings().override(store=context.params.get("store")).store or DEFAULT_ROOT)
        keys = list(islice(_keys(root, incomplete), _MOST_KEYS))
        sources = read_sources(root)
        return [(key[:12], sources[key].source if key in sources else "") for key in keys]
    return []


def _keys(root: Path, beginning: str) -> Iterator[str]:
    from pictool.store.entries import keys_of

    for shard in range(256):
        name = f"{shard:02x}"
        if name.startswith(beginning[:2]):
            yield from (key for key in keys_of(root, name) if key.startswith(beginning))
