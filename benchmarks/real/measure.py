"""A prompt under full recompute, and under policies that are forced to give full's answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.real.prompts import Question
from pictool import Model, Store
from pictool.compiler.chunking import last_tokens, make_chunk
from pictool.compiler.compile import compile_chunks
from pictool.compiler.contexts import PREVIOUS
from pictool.core import Chunk, PromptText
from pictool.engines.base import first_token_kl
from pictool.linker.grid import named_policy
from pictool.linker.link import link
from pictool.linker.spec import Spec
from pictool.runtime.chat.template import Frame, make_frame
from pictool.runtime.decode import Generated, forced_logits, generate

AGAIN = "again"
_BATCH = 96  # tokens that llama.cpp computes at once, the second time


@dataclass(frozen=True)
class Measured:
    """A policy on a prompt. `kl`: nats at each token of full's answer; `rows`: share of the context's; seconds."""

    kl: list[float]
    answer: str
    same: bool
    right: bool
    rows: float
    ttft_s: float | None


def measure(model: Model, store: Store, question: Question, labels: Sequence[str], tokens: int) -> dict[str, Any]:
    """One prompt under full recompute, and under each of POLICY, POLICY@AFTER, POLICY+CODEC and `again`."""
    started = time.perf_counter()
    spec = make_spec(model, question, tokens)
    full = link(model, store, spec)
    answer = generate(model, full.image, tokens)
    wanted = [logits.clone() for logits in forced_logits(full.image, answer.tokens)]
    prompt = full.image.layout.tokens.tolist()
    policies = {}
    for label in labels:
        if label == AGAIN:
            forced = exact_logits(model, prompt, answer.tokens)
            policies[label] = compared(question, answer, wanted, forced, None, 1.0, None)
        else:
            policies[label] = run(model, store, linking(spec, label), question, answer, wanted)
    return {
        "id": question.id, "kind": question.kind, "query": question.query, "gold": question.gold,
        "begin": question.begin, "tokens": len(prompt), "answer": answer.text,
        "answer_tokens": [model.tokenizer.decode([token]) for token in answer.tokens],
        "right": has(answer.text, question.gold), "full_ttft_s": full.timing.ttft_s,
        "policies": {label: asdict(found) for label, found in policies.items()},
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def make_spec(model: Model, question: Question, tokens: int) -> Spec:
    """The prompt under full recompute, in the model's chat template if it has one."""
    documents: list[Chunk] = []
    for text in question.documents:
        follows = question.follows and bool(documents)
        documents.append(make_chunk(model, text, "text", follows, last_tokens(documents) if follows else ()))
    frame = make_frame(model, question.query)
    if question.begin:
        space = "" if model.tokenizer.chat_template else " "
        frame = Frame(frame.head, frame.tail + PromptText(space + question.begin))
    return Spec(
        documents=documents, policy=named_policy("full"), written=frame, separator=model.separator,
        max_new_tokens=tokens,
    )  # fmt: skip


def linking(spec: Spec, label: str) -> Spec:
    """A spec under POLICY, POLICY@AFTER or POLICY@AFTER+CODEC."""
    kind, _, codec = label.partition("+")
    name, _, after = kind.partition("@")
    return replace(spec, policy=named_policy(name), after=after or PREVIOUS, codec=codec or spec.codec)


def run(
    model: Model, store: Store, spec: Spec, question: Question, answer: Generated, wanted: Sequence[torch.Tensor]
) -> Measured:  # fmt: skip
    """A spec against full's answer and the logits of its tokens."""
    chunks = [document for document in spec.documents if isinstance(document, Chunk)]
    compile_chunks(model, store, chunks, spec.objects)  # what the store lacks; no part of TTFT
    linked = link(model, store, spec)
    forced = list(forced_logits(linked.image, answer.tokens))
    text = None
    if [int(logits.argmax()) for logits in forced] != list(answer.tokens):
        linked.image.rewind()
        text = generate(model, linked.image, spec.max_new_tokens).text
    rows = linked.recomputed / linked.image.layout.num_context
    return compared(question, answer, wanted, forced, text, rows, linked.timing.ttft_s)


def compared(
    question: Question, answer: Generated, wanted: Sequence[torch.Tensor], forced: Sequence[torch.Tensor],
    text: str | None, rows: float, ttft_s: float | None,
) -> Measured:  # fmt: skip
    """`text`: the policy's own answer, if it is not full's."""
    kl = [float(f"{first_token_kl(a, b):.4g}") for a, b in zip(wanted, forced, strict=True)]
    own = answer.text if text is None else text
    return Measured(kl, own, text is None, has(own, question.gold), rows, ttft_s)


def exact_logits(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> list[torch.Tensor]:
    """The logits of an answer's tokens by another exact computation, which differs in how sums are rounded.

    A module of `transformers` computes prompt and answer in one pass; llama.cpp the prompt in small batches.
    """
    ids = [*prompt, *answer[:-1]]
    if model.is_of_transformers:
        with plain_attention(model.module) as module, torch.no_grad():
            output = module(torch.tensor([ids], device=model.device), logits_to_keep=len(answer), use_cache=False)
        return list(output.logits[0].float().cpu())
    context, logits = model.stack.take(len(ids), 1), []  # type: ignore[attr-defined]
    try:
        for start in range(0, len(prompt), _BATCH):
            end = min(start + _BATCH, len(prompt))
            context.decode(prompt[start:end], start, wants_logits=end == len(prompt))
        logits.append(torch.from_numpy(context.logits()))
        for position, token in enumerate(answer[:-1], len(prompt)):
            context.decode([token], position, wants_logits=True)
            logits.append(torch.from_numpy(context.logits()))
    finally:
        model.stack.give_back(context)  # type: ignore[attr-defined]
    return logits


@contextmanager
def plain_attention(module: Any) -> Iterator[Any]:
    """A module of `transformers` with PyTorch's attention in place of pictool's."""
    own = module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    try:
        yield module
    finally:
        module.set_attn_implementation(own)


def has(answer: str, gold: str) -> bool:
    """Whether an answer has the expected text, whatever its case and spaces."""
    plain, wanted = (" ".join(re.findall(r"\w+", text.lower())) for text in (answer, gold))
    return bool(wanted) and wanted in plain
