"""What `--json` prints of traces, of what the model shows behind them, and of two traces compared."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pictool.trace.counts import TraceView
from pictool.trace.diff import TraceDiff
from pictool.trace.format import Trace

if TYPE_CHECKING:
    from pictool.commands.inspect import InspectOptions
    from pictool.trace.analysis import Look
    from pictool.trace.attention import AttentionMap
    from pictool.trace.deviation import Against


def trace_json(path: str, trace: Trace, view: TraceView, has_text: bool) -> dict[str, Any]:
    """Everything that the trace alone says; the tokens one by one only if asked."""
    parts = [
        {
            "source": part.source, "start": part.start, "end": part.end, "computed": part.computed,
            "per_layer": part.per_layer.tolist(),
            "score_mean": part.score and part.score[0], "score_max": part.score and part.score[1],
        }
        for part in view.parts
    ]  # fmt: skip
    for part, chunk in zip(parts[1:-1], trace.chunks, strict=True):
        part |= {"key": chunk.key, "sinks": chunk.sinks}
    found = {
        "path": path, **trace.report, "target": asdict(trace.target), "parts": parts, "layers": view.layers.tolist(),
        "generated": [asdict(one) for one in trace.generated], "candidates": [asdict(one) for one in view.candidates],
    }  # fmt: skip
    if not has_text:
        return found
    scores = None if trace.scores is None else trace.scores.tolist()
    return found | {"pieces": trace.pieces, "computed_layers": view.depth.tolist(), "scores": scores}


def look_json(trace: Trace, look: Look, options: InspectOptions) -> dict[str, Any]:
    """What was asked of the model."""
    from pictool.commands.inspect_trace import first_of

    found: dict[str, Any] = {}
    if look.attention is not None and options.sinks:
        found["sink_profile"] = _sinks(look.attention, first_of(options))
    if look.attention is not None and options.attention:
        found["attention"] = _attention(trace, look.attention, options)
    if look.against is not None:
        found["against"] = _against(look.against, look.choices)
    return found


def _sinks(seen: AttentionMap, first: int) -> dict[str, Any]:
    from pictool.trace.sinks import OFFSETS

    by_offset = seen.by_offset(OFFSETS)
    return {
        "first": first, "layers": seen.layers, "drawn": seen.initial(first).mean(2).tolist(),
        "if_even": seen.initial_if_even(first).mean(0).tolist(),
        "by_offset": [[None if x != x else x for x in row] for row in by_offset.tolist()],
    }  # fmt: skip


def _attention(trace: Trace, seen: AttentionMap, options: InspectOptions) -> dict[str, Any]:
    from pictool.trace.labels import row_labels

    return {
        "layers": seen.layers, "layer": options.layer, "head": options.head,
        "rows": [{"position": int(at), "text": text}
                 for at, text in zip(seen.positions, row_labels(trace, seen), strict=True)],
        "share": seen.share(options.layer, options.head).tolist(),
    }  # fmt: skip


def _against(against: Against, choices: tuple[str, ...]) -> dict[str, Any]:
    kv, attention = against.kv, against.attention
    return {
        "key": kv.key.tolist(), "value": kv.value.tolist(), "cosine": kv.cosine.tolist(),
        "attention_layers": attention.layers.tolist(), "attention_tokens": attention.tokens.tolist(),
        "attention_gained": attention.gained.tolist(),
        "neighbour_correlation": [None if x != x else x for x in against.correlation.layers.tolist()],
        "generated": [asdict(one) | {"choice_text": text}
                      for one, text in zip(against.generated, choices, strict=True)],
    }  # fmt: skip


def diff_json(names: tuple[str, str], diff: TraceDiff) -> dict[str, Any]:
    """Two traces compared."""
    selection = diff.selection
    return {
        "a": names[0], "b": names[1], "jaccard": selection.overall, "jaccard_layers": selection.jaccard.tolist(),
        "tokens": {name: getattr(selection, name).nonzero()[0].tolist() for name in ("both", "only_a", "only_b")},
        "kl": {"a_b": diff.kl[0], "b_a": diff.kl[1]}, "max_logit": diff.max_logit, "same_answer": diff.same_answer,
        "common": diff.common, "parting": [None if one is None else asdict(one) for one in diff.parting],
        "candidates": [asdict(one) for one in diff.candidates], "other_objects": diff.other_objects,
    }  # fmt: skip
