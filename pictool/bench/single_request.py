"""One request, measured: linked and continued by some tokens; or the same by transformers' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from pictool.bench.options import TRANSFORMERS
from pictool.bench.prompts import BenchPrompt
from pictool.controller.profile import drop_page_cache
from pictool.fidelity.transformers_module import transformers_module
from pictool.linker.link import Linked, link
from pictool.linker.policies.base import Policy
from pictool.runtime.architectures import cache_name
from pictool.runtime.decode import generate
from pictool.runtime.device import synchronize
from pictool.runtime.machine import PeakMemory

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Measurement:
    """What one request took. Fields are the keys of the JSON; what does not exist for a method is None.

    Fields:
        rows: that were computed, mean per layer over the whole prompt.
        bytes_read: of KV, from objects.
        decode_tokens_per_s: of the tokens after the first. tokens: generated.
        peak_bytes: how far memory rose.
        load_s, select_s, recompute_s, fetch_s: as of `Timing`.
    """

    ttft_s: float
    rows: float
    bytes_read: int
    decode_tokens_per_s: float | None
    peak_bytes: int | None
    tokens: tuple[int, ...]
    load_s: float | None = None
    select_s: float | None = None
    recompute_s: float | None = None
    fetch_s: float | None = None


def link_prompt(model: Model, prompt: BenchPrompt, policy: Policy, is_cold: bool) -> Linked:
    """Link a prompt.

    Args:
        is_cold: its objects are not in the page cache.
    """
    if is_cold:
        drop_page_cache(prompt.store.path(key) for key in prompt.store.keys())
    synchronize(model.device)
    return link(model, prompt.store, prompt.spec(policy))


def run_linked(
    model: Model, prompt: BenchPrompt, policy: Policy, new_tokens: int, is_cold: bool = False
) -> Measurement:  # fmt: skip
    """Link a prompt, and decode `new_tokens`."""
    with PeakMemory(model.device) as peak:
        linked = link_prompt(model, prompt, policy, is_cold)
        started = time.perf_counter()
        tokens = generate(model, linked.image, new_tokens).tokens if new_tokens else ()
        synchronize(model.device)
        decode_s = time.perf_counter() - started
    timing, steps = linked.timing, len(tokens) - 1
    return Measurement(
        ttft_s=timing.ttft_s, load_s=timing.load_s, select_s=timing.select_s, recompute_s=timing.recompute_s,
        fetch_s=timing.fetch_s, rows=float(linked.rows.sum(1).mean()), bytes_read=linked.bytes_read,
        decode_tokens_per_s=steps / decode_s if steps > 0 else None, peak_bytes=peak.bytes, tokens=tokens,
    )  # fmt: skip


def baselines_of(model: Model) -> Callable[[list[int], int], dict[str, Callable[[], Measurement]]]:
    """What measures `transformers` on ids and a number of new tokens; nothing for a GGUF file, whose `full` is
    llama.cpp's own prefill. Its module is made once."""
    if not model.is_of_transformers:
        return lambda ids, new_tokens: {}
    module = transformers_module(model)
    return lambda ids, new_tokens: {TRANSFORMERS: partial(run_transformers, model, module, ids, new_tokens)}


@dataclass
class _TokenTimes(BaseStreamer):  # type: ignore[misc]
    """Tokens, and the time at which `generate` gave each one to the host."""

    prompt_is_seen: bool = False
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        if self.prompt_is_seen:
            self.tokens.append(int(value))
            self.at.append(time.perf_counter())
        self.prompt_is_seen = True

    def end(self) -> None:
        return


def run_transformers(model: Model, module: Any, ids: list[int], new_tokens: int) -> Measurement:
    """One greedy `generate` on these ids, with the default attention and cache. TTFT is until the first token."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max(1, new_tokens), eos_token_id=sorted(model.eos_ids) or None, pad_token_id=0,
    )  # fmt: skip
    prompt, times = torch.tensor([ids], device=model.device), _TokenTimes()
    with PeakMemory(model.device) as peak, torch.inference_mode():
        synchronize(model.device)
        started = time.perf_counter()
        module.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=times,
            **{cache_name(module): DynamicCache(config=module.config)},
        )  # fmt: skip
        synchronize(model.device)
    steps, decode_s = len(times.at) - 1, times.at[-1] - times.at[0]
    return Measurement(
        ttft_s=times.at[0] - started, rows=float(len(ids)), bytes_read=0,
        decode_tokens_per_s=steps / decode_s if steps else None, peak_bytes=peak.bytes, tokens=tuple(times.tokens),
    )  # fmt: skip
