"""A look behind a trace: its link done again with the model, what attends to what, and how far that is from full.

The results can be read without torch, which only `look_behind` imports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pictool.store.store import Store
from pictool.trace.attention import AttentionMap, attention_map, decode_tokens
from pictool.trace.deviation import Against, against_full
from pictool.trace.format import Trace

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Look:
    """What the model shows of a trace; None where nobody asked. `choices` are the texts of full's choices."""

    attention: AttentionMap | None
    against: Against | None
    choices: tuple[str, ...] = ()


def look_behind(
    model: Model,
    store: Store,
    trace: Trace,
    name: str,
    *,
    attention: bool = True,
    against: bool = True,
    layer: int | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Look:
    """Repeat the link of a trace, and look at it.

    Args:
        name: what messages call the trace. layer: the only one whose attention is kept (default: all).

    Raises:
        TraceError: another model, or a link that cannot be repeated.
        PicError: a damaged object, or a map that is too large.
    """
    from pictool.runtime.pieces import pieces_of
    from pictool.trace.replay import link_in_full, replay

    tokens = [one.id for one in trace.generated]
    linked = replay(model, store, trace, name, on_compile).image
    decoded = decode_tokens(linked, tokens, keep_scores=attention)
    seen = attention_map(linked, decoded, layer) if attention else None
    if not against:
        return Look(seen, None)
    full = link_in_full(model, store, trace, name).image
    decoded_full = decode_tokens(full, tokens, keep_scores=False)
    found = against_full(linked, full, decoded, decoded_full, tokens)
    return Look(seen, found, tuple(pieces_of(model.tokenizer, [one.choice])[0] for one in found.generated))
