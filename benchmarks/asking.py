"""Many questions over one linked context at once: the context's KV does not depend on the tail, under any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool import Chunk, Linked, Model, Policy, Store, link
from pictool.runtime.attention import Run
from pictool.runtime.caches import PrefixedCache
from pictool.runtime.rope import tables_at
from pictool.runtime.stack import LayerStack
from pictool.runtime.template import make_frame
from pictool.world.generate import Question

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """What a linked context answers: log-probabilities of the first token, whether the greedy answer is right.

    `rows` is the mean share of context rows that were computed per layer.
    """

    first: Tensor  # float64 [questions, vocab]
    right: Numbers  # [questions]
    rows: float
    ttft_s: float


def ask(
    model: Model, store: Store, chunks: Sequence[Chunk], questions: Sequence[Question], policy: Policy, **options: Any
) -> Answers:
    """Link for the first question, then ask all of them over its context.

    Greedy decoding gives the answer if, fed with it, the model prefers each of its tokens and then ends.
    """
    frames = [make_frame(model, question.text) for question in questions]
    linked = link(model, store, chunks, frames[0].tail, policy, head=frames[0].head, **options)
    tails = [model.encode(frame.tail) for frame in frames]
    golds = [(*model.encode(" " + question.answer), *sorted(model.eos_ids)) for question in questions]
    hidden = _run(model.stack, linked, [tail + gold[:-1] for tail, gold in zip(tails, golds, strict=True)])
    ends = [len(tail) - 1 for tail in tails]
    logits = [
        model.stack.logits(row[end : end + len(gold)]) for row, end, gold in zip(hidden, ends, golds, strict=True)
    ]
    assert linked.image.logits is not None
    assert float((logits[0][0] - linked.image.logits).abs().max()) < 1e-3  # the same as asking one at a time
    right = [one.argmax(-1).tolist() == list(gold) for one, gold in zip(logits, golds, strict=True)]
    first = torch.stack([one[0] for one in logits]).double().log_softmax(-1)
    share = linked.recomputed / linked.image.layout.num_context
    return Answers(first, np.asarray(right, dtype=float), share, linked.timing.ttft_s)


def kl(full: Answers, linked: Answers) -> Numbers:
    """KL(full ‖ linked) of every question's first token, in nats."""
    each: Numbers = (full.first.exp() * (full.first - linked.first)).sum(-1).clamp_min(0).numpy()
    return each


def _run(stack: LayerStack, linked: Linked, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states [sequences, longest, hidden] of token sequences that stand behind the context."""
    start, longest = linked.image.layout.num_context, max(map(len, sequences))
    tokens = torch.tensor([[*one, *[one[-1]] * (longest - len(one))] for one in sequences])
    tables = stack.rotary_tables(torch.arange(start + longest))
    rows = tables_at(tables, slice(start, None))
    image = linked.image
    context = {
        layer: (image.key(layer)[:, :, :start], image.value(layer)[:, :, :start]) for layer in range(stack.num_layers)
    }
    runs = (Run(0, start, start + longest),)
    return stack.layers(stack.embed(tokens), PrefixedCache(stack, rows, context), rows, runs)
