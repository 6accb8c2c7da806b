"""Conversations that take turns: tokens that `pic serve` reuses, beside an exact prefix cache without limits.

    OMP_NUM_THREADS=1 python -m benchmarks.conversations --out benchmarks/results/conversations.json

Each conversation is the loop of an agent: a system text that all share, a task, and turns of an answer and a tool's
output. One request of each is sent in turn, at temperature 0. Texts are random tokens, so nothing repeats by chance.
The cache without limits reuses every token up to the first that differs from all earlier prompts with their answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.output import write_results
from pictool.core import Sampling
from pictool.linker.grid import parse_policy
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model, load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, DeltaEvent, RawPrompt, StartEvent, TokenizedText
from pictool.store.store import Store

SYSTEM, TASK = 200, 60  # tokens
OUTPUT = (20, 160)  # of a tool, from and to
Trie = dict[int, "Trie"]


@dataclass
class Unlimited:
    """An exact prefix cache without limits."""

    root: Trie = field(default_factory=dict)

    def reused(self, tokens: Sequence[int]) -> int:
        """How many of a prompt's tokens it has; the last one is always computed."""
        node, depth = self.root, 0
        while depth < len(tokens) - 1 and tokens[depth] in node:
            node, depth = node[tokens[depth]], depth + 1
        return depth

    def add(self, tokens: Sequence[int]) -> None:
        node = self.root
        for token in tokens:
            node = node.setdefault(token, {})


async def ask(model: Model, backend: TorchBackend, tokens: Sequence[int], max_tokens: int) -> tuple[int, list[int]]:
    """Prefix tokens that were reused, and the answer's tokens, as far as its text gives them again."""
    work = AnswerRequest(Tenant("one"), RawPrompt((TokenizedText(tuple(tokens)),)), Sampling(0.0), max_tokens)
    prefix, text = 0, ""
    async for event in backend.answer(work):
        if isinstance(event, StartEvent):
            prefix = event.reuse.prefix
        elif isinstance(event, DeltaEvent):
            text += event.text
    return prefix, [int(token) for token in model.encode(text)]


async def converse(model: Model, conversations: int, options: argparse.Namespace, share: float) -> dict[str, Any]:
    """One row: so many conversations, in a pool that holds `share` of what they have at the end."""
    draw, unlimited = random.Random(conversations), Unlimited()

    def text(count: int) -> list[int]:
        return [draw.randrange(10, model.config.vocab_size) for _ in range(count)]

    system = text(SYSTEM)
    talks = [[*system, *text(TASK)] for _ in range(conversations)]
    longest = SYSTEM + TASK + options.turns * (OUTPUT[1] + options.answer)
    slots = max(longest + GROWTH, round(share * conversations * (longest + GROWTH)))
    settings = BackendSettings(parse_policy("legolink-16"), pool_bytes=slots * slot_bytes(model))
    asked = reused = possible = 0
    with tempfile.TemporaryDirectory() as root, TorchBackend(model, Store(root), settings) as backend:
        for _ in range(options.turns):
            for talk in talks:
                possible += unlimited.reused(talk)
                prefix, answer = await ask(model, backend, talk, options.answer)
                reused, asked = reused + prefix, asked + len(talk)
                talk += answer
                unlimited.add(talk)
                talk += text(draw.randint(*OUTPUT))
        counts = backend.status().pool
    assert counts is not None
    return {
        "conversations": conversations, "requests": conversations * options.turns, "pool_tokens": slots,
        "prompt_tokens": asked, "unlimited_tokens": possible, "reused_tokens": reused, "share": reused / possible,
        "evicted_tokens": counts.evicted_bytes // slot_bytes(model), "moved_runs": counts.moves,
    }  # fmt: skip


def make_parser(description: str | None, turns: int) -> argparse.ArgumentParser:
    """The options of a script that holds conversations."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--model", default="embedded-small")
    parser.add_argument("--conversations", default="1,8,64", help="numbers of conversations")
    parser.add_argument("--turns", type=int, default=turns)
    return parser


def main() -> None:
    parser = make_parser(__doc__, turns=12)
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer at most")
    options = parser.parse_args()
    model = load_model(options.model)
    rows = []
    for number in map(int, options.conversations.split(",")):
        for share in (1.0, 0.5) if number > 1 else (1.0,):
            rows.append({"pool": share} | asyncio.run(converse(model, number, options, share)))
            print(rows[-1])
    if options.out is not None:
        write_results(options.out, {"model": options.model, "rows": rows})


if __name__ == "__main__":
    main()
