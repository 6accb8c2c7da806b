"""The default engine: links a request on the torch runtime, decodes, and compares with full recompute if asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pictool.compiler.compile import CODEC, Compiled, compile
from pictool.linker.link import Linked, link
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import Document
from pictool.runtime.decode import Generated, Sampling, generate
from pictool.runtime.template import Frame, make_frame
from pictool.store.store import Store
from pictool.trace.format import Trace, write_trace
from pictool.trace.replay import record_trace

if TYPE_CHECKING:
    from pictool.runtime.model import Model

ENGINE = "torch"
__all__ = ["Answer", "Comparison", "Request", "answer", "compare_answers", "compile", "first_token_kl"]


@dataclass(frozen=True)
class Request:
    """One question over documents, and how to link them."""

    query: str
    documents: Sequence[Document] = ()
    policy: Policy = field(default_factory=lambda: make_policy("legolink", {}))
    head: str | None = None
    query_template: str | None = None
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    sinks: int | None = None
    chunk_tokens: int | None = None
    codec: str = CODEC


@dataclass(frozen=True)
class Comparison:
    """A link against full recompute of the same prompt. `kl` is KL(full ‖ linked) of the first token, in nats."""

    answer: str
    ttft_s: float
    speedup: float
    kl: float
    same_first_token: bool
    same_answer: bool
    common_prefix: int  # of generated tokens

    def report(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Answer:
    """What a request gives. `linked.image` has grown by the generated tokens; `logits` are the first token's.

    `loaded` is the model that gave it, `model` what the user calls that.
    """

    generated: Generated
    linked: Linked
    logits: torch.Tensor  # float32 [vocab]
    decode_s: float
    loaded: Model
    compare: Comparison | None = None

    @property
    def model(self) -> str:
        return self.loaded.name

    @property
    def text(self) -> str:
        return self.generated.text.strip()

    def report(self) -> dict[str, Any]:
        """The JSON of `pic link --json` (DESIGN §6)."""
        layout, timing = self.linked.image.layout, self.linked.timing
        return {
            "answer": self.text,
            "algo": self.linked.policy.name,
            "params": self.linked.policy.params,
            "model": self.model,
            "engine": ENGINE,
            "tokens": {
                "head": layout.starts[1],
                "context": layout.num_context,
                "tail": layout.num_tokens - layout.num_context,
                "prompt": layout.num_tokens,
                "recomputed": self.linked.recomputed,
                "generated": len(self.generated.tokens),
            },
            "timing": {
                "load_s": timing.load_s,
                "select_s": timing.select_s,
                "recompute_s": timing.recompute_s,
                "ttft_s": timing.ttft_s,
                "decode_s": self.decode_s,
            },
            "compare": self.compare.report() if self.compare else None,
        }

    def write_trace(self, path: str | Path) -> None:
        """Write what this link did as a trace file."""
        write_trace(Path(path), self.trace())

    def trace(self) -> Trace:
        """What this link did."""
        return record_trace(self.loaded, self.linked, self.logits, self.generated, self.report())


def answer(
    model: Model,
    store: Store,
    request: Request,
    *,
    compare: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Answer:
    """Link, decode, and (with `compare`) do the same under full recompute.

    Raises:
        PicError: see `link` and `generate`.
    """
    frame = make_frame(model, request.query, request.head, request.query_template)
    full_policy = make_policy("full", {})
    if compare:  # a first pass over the model, so that the first of the two is not timed with its start-up
        link(model, store, [], frame.tail, full_policy, head=frame.head)
    mine = _run(model, store, request, frame, request.policy, on_text, on_compile)
    if not compare:
        return mine
    full = _run(model, store, request, frame, full_policy, None, None)
    return replace(mine, compare=compare_answers(mine, full))


def _run(
    model: Model,
    store: Store,
    request: Request,
    frame: Frame,
    policy: Policy,
    on_text: Callable[[str], None] | None,
    on_compile: Callable[[Compiled], None] | None,
) -> Answer:
    linked = link(
        model, store, request.documents, frame.tail, policy, head=frame.head,
        sinks=request.sinks, chunk_tokens=request.chunk_tokens, codec=request.codec,
        on_compile=on_compile,
    )  # fmt: skip
    logits = linked.image.logits
    assert logits is not None
    started = time.perf_counter()
    generated = generate(model, linked.image, request.max_new_tokens, request.sampling, on_text)
    return Answer(generated, linked, logits, time.perf_counter() - started, model)


def compare_answers(mine: Answer, full: Answer) -> Comparison:
    """How far an answer is from that of full recompute, and how much sooner its first token came."""
    a, b = mine.generated.tokens, full.generated.tokens
    different = np.flatnonzero([x != y for x, y in zip(a, b, strict=False)])
    return Comparison(
        answer=full.text,
        ttft_s=full.linked.timing.ttft_s,
        speedup=full.linked.timing.ttft_s / mine.linked.timing.ttft_s,
        kl=first_token_kl(full.logits, mine.logits),
        same_first_token=bool(full.logits.argmax() == mine.logits.argmax()),
        same_answer=mine.text == full.text,
        common_prefix=int(different[0]) if len(different) else min(len(a), len(b)),
    )


def first_token_kl(full: torch.Tensor, linked: torch.Tensor) -> float:
    """KL(full ‖ linked) in nats of two logit vectors [vocab]."""
    p, q = full.double().log_softmax(-1), linked.double().log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum()))
