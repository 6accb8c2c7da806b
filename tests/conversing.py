"""A server's backend in this process that keeps conversations on disk: `converse`, a command beside those of `pic`.

    converse STORE MODEL [--size SIZE] [--seed N] [--turns N]

Each line of the output is an answer under `full`, which may depend neither on what was kept nor on what the disk does.
With a seed other than 0 tenants take turns, clients vanish, histories fork and are edited. What a tenant's request
reuses must be of its own requests, those of earlier servers on this store included; else it ends with 3.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np

from pictool.commands.console.errors import reports_errors
from pictool.commands.settings.types import parse_size
from pictool.core import Sampling
from pictool.linker.grid import parse_policy
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model, load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, DeltaEvent, Linking, RawPrompt, StartEvent, TokenizedText
from pictool.store.store import Store

TENANTS = (Tenant("one", "a" * 32), Tenant("two", "b" * 32))
ANSWER, MOST = 3, 140  # tokens of an answer, and of a history
_FOREIGN = 3  # exit code


def warn(message: str) -> None:
    print(f"pic: {message}", file=sys.stderr)


@reports_errors
def converse() -> None:
    """Hold the conversations of `sys.argv`, and print the answers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--size", default="1G")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    model = load_model(options.model)
    settings = BackendSettings(
        parse_policy("legolink-4"), refresh_s=3600, pool_bytes=2 * (MOST + GROWTH) * slot_bytes(model),
        kept_bytes=parse_size("--size", options.size),
    )  # fmt: skip
    is_new, draw = not Path(options.store, "prefixes").exists(), random.Random(options.seed)
    with TorchBackend(model, Store(Path(options.store), on_warning=warn), settings) as backend:
        for text in asyncio.run(hold(backend, model, draw, options.turns, options.seed > 0, is_new)):
            print(repr(text))


async def hold(
    backend: TorchBackend, model: Model, draw: random.Random, turns: int, is_wild: bool, is_new: bool
) -> list[str]:
    """The answers of so many turns; `is_new`: no earlier server kept anything."""

    def said(count: int) -> list[int]:
        return [draw.randrange(10, model.config.vocab_size) for _ in range(count)]

    texts, asked = list[str](), {tenant: list[list[int]]() for tenant in TENANTS}
    found = list[tuple[Tenant, list[int], int, int]]()  # requests, tokens reused, and how many the tenant had before
    start, other = said(40), said(40)
    talks = [(tenant, [*tokens]) for tenant in TENANTS for tokens in (start, other)]
    for _ in range(turns):
        tenant, tokens = draw.choice(talks) if is_wild else talks[0]
        if len(tokens) > MOST - 40 or (is_wild and draw.random() < 0.3):
            del tokens[draw.randrange(16, len(tokens)) :]  # a fork, or an edit: what follows is another
        tokens += said(draw.randint(1, 30) if is_wild else 20)
        goes = is_wild and draw.random() < 0.2
        text, reused = await ask(backend, tenant, tokens, goes)
        found.append((tenant, [*tokens], reused, len(asked[tenant])))
        own = list(model.encode(text))
        asked[tenant].append([*tokens, *own])
        if not goes:
            texts.append(text)
            tokens += own
    for tenant, tokens, reused, before in found if is_wild else ():  # else perhaps of a server beside this one
        own_requests = asked[tenant][:before] if is_new else asked[tenant]
        if reused > max((common(tokens, earlier) for earlier in own_requests), default=0):
            warn(f"a request of {tenant.name} reuses {reused} tokens that it never had")
            sys.exit(_FOREIGN)
    return texts


async def ask(backend: TorchBackend, tenant: Tenant, tokens: Sequence[int], goes: bool) -> tuple[str, int]:
    """An answer, and the tokens reused; a client that `goes` vanishes with its first text."""
    prompt = RawPrompt((TokenizedText(tuple(tokens)),))
    work = AnswerRequest(tenant, prompt, Sampling(0.0), ANSWER, linking=Linking("full"))
    text, reused = "", 0
    async with aclosing(backend.answer(work)) as events:
        async for event in events:
            if isinstance(event, StartEvent):
                reused = event.reuse.prefix
            elif isinstance(event, DeltaEvent):
                text += event.text
                if goes:
                    break
    return text, reused


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differ[0]) if len(differ) else size
