"""What a compile would cost, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count, show_size

if TYPE_CHECKING:
    from pictool.compiler.forecast import Forecast
    from pictool.core import Chunk, CompileOptions
    from pictool.runtime.model import Model
    from pictool.store.store import Store


def print_forecast(
    found: Forecast, num_documents: int, as_json: bool, more: Mapping[str, Any] | None = None
) -> None:  # fmt: skip
    if as_json:
        print_json({"documents": num_documents} | found.report() | dict(more or {}))
        return
    sizes = [f"{codec} {show_size(size)}" for codec, size in found.num_bytes.items()]
    print(f"documents  {num_documents:,d}, {count(found.num_chunks, 'chunk')}, {found.num_tokens:,d} tokens")
    print(f"to compile {count(found.new_chunks, 'chunk')}, {found.new_tokens:,d} tokens")
    print(f"objects    {', '.join(sizes)}")
    print(f"time       about {show_time(found.seconds)} on this machine, as it is now")
    print(f"disk       {show_size(found.free_bytes)} free, of which {found.codec} takes {found.share_of_disk:.1%}")
    if found.share_of_disk > 1:
        note("the objects do not fit; use another --codec, fewer files or another --store")


def show_time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def warn_of_disk(model: Model, store: Store, chunks: Sequence[Chunk], options: CompileOptions) -> None:
    """Say so if the objects that the store lacks may take more than a tenth of the free disk. Needs no weights."""
    from pictool.compiler.compile import object_key
    from pictool.compiler.forecast import SHARE_OF_DISK, free_bytes, tokens_bytes

    free = free_bytes(store.root)
    if tokens_bytes(model, sum(map(len, chunks)), options.codec) <= free * SHARE_OF_DISK:
        return
    missing = {key: len(chunk) for chunk in chunks if not store.has(key := object_key(model, chunk, options))}
    size = tokens_bytes(model, sum(missing.values()), options.codec)
    if size > free * SHARE_OF_DISK:
        note(f"objects of up to {show_size(size)}, and {show_size(free)} of disk are free; see --dry-run")
