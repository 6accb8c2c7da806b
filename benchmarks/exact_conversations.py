"""Conversations under `full` against `transformers`, request by request, whatever happens to them on the server.

    OMP_NUM_THREADS=1 python -m benchmarks.exact_conversations --out benchmarks/results/exact_conversations.json

Conversations of two tenants, in a pool that holds a quarter of them, with prefixes on disk. Up to four requests are
under way at once. Some clients vanish within their answer, some histories go on in two ways, and the server starts
again on the same store. Each whole answer is compared with what `transformers`' `generate` gives for its prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.output import write_results
from pictool.core import PromptText, Sampling
from pictool.linker.grid import parse_policy
from pictool.linker.residency import ResidentObjects
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model, load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, DeltaEvent, Linking, RawPrompt, StartEvent, TokenizedText
from pictool.store.store import Store
from training.world.generate import question_text, write_prompt

TENANTS = (Tenant("one", "a" * 32), Tenant("two", "b" * 32))
TALKS, ROOM, MOST = 12, 3, 600  # conversations, those that the pool holds, tokens of one
ANSWER = 12  # tokens
GOES, FORKS = 0.15, 0.2  # shares of the requests


@dataclass
class Talk:
    tenant: Tenant
    tokens: list[int]


class Server:
    """A backend on one store, that can start again."""

    def __init__(self, model: Model, root: str) -> None:
        self._model, self._root = model, root
        size = ROOM * (MOST + GROWTH) * slot_bytes(model)
        self._settings = BackendSettings(parse_policy("legolink-16"), pool_bytes=size, kept_bytes=1 << 30)
        self.counts, self.evicted = Counter[str](), 0
        self._start()

    def _start(self) -> None:
        self.backend = TorchBackend(self._model, Store(self._root), self._settings)

    def close(self) -> None:
        """End it, and count what its pool holds for nobody."""
        self.backend.close()
        pool, counts = self.backend._residents, self.backend.status().pool
        assert isinstance(pool, ResidentObjects) and counts is not None
        pool._settle()
        self.counts["leaked"] += len(pool._regions) + sum(piece.is_held for piece in pool._prefixes.pieces)
        assert sum(piece.length for piece in pool._prefixes.pieces) <= pool.num_slots
        self.evicted += counts.evicted_bytes // slot_bytes(self._model)

    def restart(self) -> None:
        self.close()
        self._start()
        self.counts["restarts"] += 1

    async def ask(self, talk: Talk, goes_after: int | None) -> str | None:
        """The answer, and it is counted; None if the client vanished after so many events of text."""
        prompt = RawPrompt((TokenizedText(tuple(talk.tokens)),))
        work = AnswerRequest(talk.tenant, prompt, Sampling(0.0), ANSWER, linking=Linking("full"))
        text, events = "", 0
        async with aclosing(self.backend.answer(work)) as answer:
            async for event in answer:
                if isinstance(event, StartEvent):
                    self.counts["prefix_tokens"] += event.reuse.prefix
                    self.counts["prompt_tokens"] += event.reuse.num_tokens
                elif isinstance(event, DeltaEvent):
                    text, events = text + event.text, events + 1
                    if events == goes_after:
                        self.counts["vanished"] += 1
                        return None
        return text


async def converse(server: Server, model: Model, requests: int, draw: random.Random) -> list[tuple[list[int], str]]:
    """Prompts and their whole answers."""

    def said() -> list[int]:
        prompt = write_prompt(draw, 2)
        return list(model.encode("".join(prompt.pages[:1]) + question_text(prompt.questions[0].text)))

    system = list(model.encode(PromptText((model.tokenizer.bos_token or "") + "".join(write_prompt(draw, 2).pages))))
    talks, answered = [Talk(TENANTS[i % 2], [*system]) for i in range(TALKS)], list[tuple[list[int], str]]()
    while len(answered) < requests:
        batch = draw.sample(talks, draw.randint(1, 4))
        for talk in batch:
            if len(talk.tokens) > MOST - 200 or draw.random() < FORKS:
                other = draw.choice([one for one in talks if one.tenant is talk.tenant]).tokens
                talk.tokens = other[: draw.randint(len(system), min(len(other), MOST // 2))]
                server.counts["forks"] += 1
            talk.tokens += said()
        goes = [draw.randint(1, 3) if draw.random() < GOES else None for _ in batch]
        texts = await asyncio.gather(*map(server.ask, batch, goes))
        for talk, text in zip(batch, texts, strict=True):
            if text is not None:
                answered.append(([*talk.tokens], text))
                talk.tokens += model.encode(text)
        if draw.random() < 4 / requests:
            server.restart()
    return answered


def run(requests: int, seed: int = 0, name: str = "embedded-small") -> Mapping[str, Any]:
    """Ask, and compare."""
    model = load_model(name, device="cpu", dtype="float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as root:
        server = Server(model, root)
        answered = asyncio.run(converse(server, model, requests, random.Random(seed)))
        server.close()
    different = [text for tokens, text in answered if text != exact(model, reference, tokens)]
    counts = {**server.counts, "evicted_tokens": server.evicted}
    return {"model": name, "requests": len(answered), "different": len(different), **counts}


def exact(model: Model, reference: Any, tokens: list[int]) -> str:
    """`transformers`' answer."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ANSWER,
            eos_token_id=sorted(model.eos_ids), pad_token_id=0,
        )  # fmt: skip
    given = [token for token in out[0, len(tokens) :].tolist() if token not in model.eos_ids]
    return str(model.tokenizer.decode(given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = run(options.requests, options.seed)
    print(found)
    if options.out is not None:
        write_results(options.out, found)


if __name__ == "__main__":
    main()
