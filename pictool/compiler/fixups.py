"""Whether chunks get a table of fixups, behind how many probes, and the tables. Imports no torch before one is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pictool.core import Chunk
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.fixups import Table
    from pictool.runtime.model import Model

PROBES = 8  # where a table is wanted and nothing else is said
PROBE_TOKENS = 60


def probe_tokens(model: Model) -> int:
    """Tokens of a probe: `PROBE_TOKENS`, or half of the model's positions if it has few."""
    return min(PROBE_TOKENS, model.max_positions // 2)


def recipe_of(model: Model, chunk: Chunk, probes: int) -> str | None:
    """How this chunk's table is made, as its object tells it; None for no table.

    Raises:
        InputError: one probe, or a chunk that does not fit behind one.
    """
    if probes < 0 or probes == 1:
        raise InputError(f"probes {probes}: must be 0, or 2 or more; a table tells what differs between them")
    length = probe_tokens(model)
    if probes and len(chunk) + length > model.max_positions:
        raise InputError(
            f"{chunk.source}: {len(chunk)} tokens behind a probe of {length}, but the model takes "
            f"{model.max_positions} positions; cut it with --chunk-tokens, or compile it without --probes"
        )
    return f"self-{probes}x{length}" if probes else None


def tables_of(model: Model, chunks: Mapping[str, Chunk], probes: int, alone: bool) -> Mapping[str, Table]:
    """The tables of chunks, by their keys. They are small: all are made before the first object is written."""
    if not probes or not chunks:
        return {}
    from pictool.runtime.fixups import fixup_tables
    from pictool.runtime.probes import probes_of

    behind = probes_of(model, probes, probe_tokens(model))
    keys = list(chunks)
    found = fixup_tables(model, behind, [chunks[key].tokens for key in keys], alone)
    return {keys[index]: table for index, table in found}
