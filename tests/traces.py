"""Traces for tests: made by hand, for what reads them without a model, and of links by a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pictool.core import Geometry, Layout, Target
from pictool.store.store import Store
from pictool.trace.format import Candidate, GeneratedToken, Trace, TracedChunk

LAYERS, VOCAB = 3, 7


def make_trace(rows: Sequence[Sequence[int]] = ((2, 3), (2,), ()), **changes: Any) -> Trace:
    """Head of 1, chunks of 3 and 4, tail of 2; `rows` are the context positions computed at each layer."""
    layout = Layout.of([0], [[1, 2, 3], [4, 5, 6, 1]], [2, 3])
    computed = np.zeros((LAYERS, 10), dtype=bool)
    computed[:, 8:] = True
    for layer, positions in enumerate(rows):
        computed[layer, list(positions)] = True
    fields: dict[str, Any] = {
        "target": Target("llama", "a" * 64, "b" * 64, "float32", Geometry(LAYERS, 2, 4)),
        "layout": layout,
        "rows": computed,
        "logits": np.array([0, 1, 2, 3, 0, 0, -1], dtype=np.float32),
        "scores": None,
        "texts": ("<s>", "a bc", "def g", " h?"),
        "chunks": (TracedChunk("a.txt", "1" * 64), TracedChunk("b.txt", "2" * 64, after=((5, 6, 7, 8),))),
        "pieces": ("<s>", "a", " b", "c", "d", "e", "f", " g", " h", "?"),
        "generated": (GeneratedToken(3, " yes", -0.5), GeneratedToken(1, "</s>", -0.01)),
        "top": (Candidate(3, " yes"), Candidate(2, " no")),
    }
    fields |= changes
    return recounted(Trace(**{"report": {}, **fields})) if "report" not in changes else Trace(**fields)


def recounted(trace: Trace) -> Trace:
    """A trace whose report counts its own tokens and rows."""
    layout, context = trace.layout, trace.layout.num_context
    return replace(trace, report={
        "answer": "yes", "algo": "legolink", "params": {"k": 2}, "model": "tiny", "engine": "torch",
        "tokens": {
            "head": layout.starts[1], "context": context, "tail": layout.num_tokens - context,
            "prompt": layout.num_tokens, "recomputed": float(trace.rows[:, :context].sum(1).mean()),
            "generated": len(trace.generated),
        },
        "timing": {"load_s": 0.001, "select_s": 0.0, "recompute_s": 0.003, "ttft_s": 0.004, "decode_s": 0.002},
        "compare": None,
    })  # fmt: skip


def trace_of_link(store: Store, policy: str, architecture: str = "llama") -> Trace:
    """Link two documents by the tiny model of an architecture, and return the trace."""
    from subjects import default_policy, subject

    from pictool.api import answer
    from pictool.linker.spec import Spec

    for name, text in (("a.txt", "The harbour was quiet. It holds a festival."), ("b.txt", "Words: 1,024 and 3.14.")):
        Path(name).write_text(text)
    spec = Spec("why?", ["a.txt", "b.txt"], default_policy(policy), max_new_tokens=6)
    return answer(subject(architecture).model, store, spec).trace()
