"""Analyse a trace by running its link again: what attends to what, and how far that is from full recompute.

The results can be read without torch, which only `analyse_trace` imports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pictool.store.store import Store
from pictool.trace.attention import AttentionMap, attention_map, decode_tokens
from pictool.trace.deviation import DeviationFromFull, deviation_from_full
from pictool.trace.format import Trace

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class TraceAnalysis:
    """What a repeated link shows; None for what was not requested.

    Attributes:
        attention: of the tail and the generated tokens.
        deviation: from full recompute.
        choices: for each generated token, the text of the token that full recompute finds likeliest there.
    """

    attention: AttentionMap | None
    deviation: DeviationFromFull | None
    choices: tuple[str, ...] = ()


def analyse_trace(
    model: Model,
    store: Store,
    trace: Trace,
    name: str,
    *,
    attention: bool = True,
    deviation: bool = True,
    layer: int | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
) -> TraceAnalysis:
    """Repeat the link of a trace and analyse it.

    Args:
        name: the trace's in messages.
        attention, deviation: what to compute.
        layer: the only layer whose attention is kept (default: all).
        on_compile: called with every object that had to be compiled again.

    Raises:
        TraceError: another model, or a link that cannot be repeated.
        ModelError: a GGUF file.
        PicError: a damaged object, or an attention map that is too large.
    """
    from pictool.runtime.encoder import pieces_of
    from pictool.trace.replay import replay, replay_in_full

    _ = model.module  # raises for a GGUF file: llama.cpp shows no keys
    tokens = [token.id for token in trace.generated]
    linked = replay(model, store, trace, name, on_compile).image
    decoded = decode_tokens(linked, tokens, keep_scores=attention)
    map_of_link = attention_map(linked, decoded, layer) if attention else None
    if not deviation:
        return TraceAnalysis(map_of_link, None)
    full = replay_in_full(model, store, trace, name).image
    decoded_full = decode_tokens(full, tokens, keep_scores=False)
    from_full = deviation_from_full(linked, full, decoded, decoded_full, tokens)
    choices = tuple(pieces_of(model.tokenizer, [token.choice])[0] for token in from_full.generated)
    return TraceAnalysis(map_of_link, from_full, choices)
