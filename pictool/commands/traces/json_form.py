"""The JSON of `pic inspect TRACE`, with `--diff` too."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pictool.trace.counts import TraceCounts
from pictool.trace.diff import TraceDiff
from pictool.trace.format import Trace

if TYPE_CHECKING:
    from pictool.commands.traces.options import InspectOptions
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention import AttentionMap
    from pictool.trace.deviation import DeviationFromFull


def trace_json(path: str, trace: Trace, counts: TraceCounts, has_text: bool) -> dict[str, Any]:
    """Return what the trace alone says; token by token only with `has_text`."""
    parts = [
        {
            "source": part.source, "start": part.start, "end": part.end, "computed": part.computed,
            "per_layer": part.per_layer.tolist(),
            "score_mean": part.score and part.score[0], "score_max": part.score and part.score[1],
        }
        for part in counts.parts
    ]  # fmt: skip
    for part, chunk in zip(parts[1:-1], trace.chunks, strict=True):
        part |= {"key": chunk.key, "before": max(map(len, chunk.after), default=0)} if chunk.key else {}
    whole = {
        "path": path, **trace.report, "target": trace.target.fields, "parts": parts,
        "layers": counts.rows_per_layer.tolist(), "generated": [asdict(token) for token in trace.generated],
        "candidates": [asdict(candidate) for candidate in counts.candidates],
    }  # fmt: skip
    if not has_text:
        return whole
    scores = None if trace.scores is None else trace.scores.tolist()
    return whole | {"pieces": trace.pieces, "computed_layers": counts.layers_per_token.tolist(), "scores": scores}


def analysis_json(trace: Trace, analysis: TraceAnalysis, options: InspectOptions) -> dict[str, Any]:
    """Return the parts of an analysis that the options name."""
    parts: dict[str, Any] = {}
    if analysis.attention is not None:
        parts["attention"] = _attention(trace, analysis.attention, options)
    if analysis.deviation is not None:
        parts["against"] = _deviation(analysis.deviation, analysis.choices)
    return parts


def _attention(trace: Trace, attention: AttentionMap, options: InspectOptions) -> dict[str, Any]:
    from pictool.trace.labels import row_labels

    return {
        "layers": attention.layers, "layer": options.layer, "head": options.head,
        "rows": [{"position": int(position), "text": text}
                 for position, text in zip(attention.positions, row_labels(trace, attention), strict=True)],
        "share": attention.share(options.layer, options.head).tolist(),
    }  # fmt: skip


def _deviation(deviation: DeviationFromFull, choices: tuple[str, ...]) -> dict[str, Any]:
    kv, attention = deviation.kv, deviation.attention
    return {
        "key": kv.key.tolist(), "value": kv.value.tolist(), "cosine": kv.cosine.tolist(),
        "attention_layers": attention.layers.tolist(), "attention_tokens": attention.tokens.tolist(),
        "attention_gained": attention.gained.tolist(),
        "generated": [asdict(token) | {"choice_text": text}
                      for token, text in zip(deviation.generated, choices, strict=True)],
    }  # fmt: skip


def diff_json(names: tuple[str, str], diff: TraceDiff) -> dict[str, Any]:
    """Return a comparison of two traces."""
    selection = diff.selection
    return {
        "a": names[0], "b": names[1], "jaccard": selection.overall, "jaccard_layers": selection.jaccard.tolist(),
        "tokens": {name: getattr(selection, name).nonzero()[0].tolist() for name in ("both", "only_a", "only_b")},
        "kl": {"a_b": diff.kl[0], "b_a": diff.kl[1]}, "max_logit": diff.max_logit, "same_answer": diff.same_answer,
        "common": diff.common, "parting": [None if token is None else asdict(token) for token in diff.parting],
        "candidates": [asdict(candidate) for candidate in diff.candidates], "other_objects": diff.other_objects,
    }  # fmt: skip
