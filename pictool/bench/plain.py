"""The baseline: `transformers`' own `generate` over the same weights, with its default attention and cache."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from pictool.bench.floor import link_flops
from pictool.bench.sample import Sample, settle
from pictool.runtime.machine import PeakMemory

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def plain_module(model: Model) -> Any:
    """A second module over the parameters of `model`, as `transformers` makes it: no weight is held twice."""
    ours, config = model.module, copy.deepcopy(model.config)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=model.torch_dtype, attn_implementation="sdpa")
    plain.load_state_dict(ours.state_dict(), assign=True)
    # One of its own: where the rotation depends on the length, it remembers the prompts that it saw.
    plain.model.rotary_emb = type(ours.model.rotary_emb)(config).to(model.device)
    buffers = dict(ours.named_buffers())
    for name, buffer in list(plain.named_buffers()):
        if buffer.is_meta:  # not part of the state
            above, _, last = name.rpartition(".")
            plain.get_submodule(above).register_buffer(last, buffers[name].clone(), persistent=False)
    return plain.requires_grad_(False).eval()


@dataclass
class _Times(BaseStreamer):  # type: ignore[misc]
    """When each token was there; `generate` hands them over on the host."""

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


def run_plain(model: Model, plain: Any, ids: list[int], new_tokens: int) -> Sample:
    """One greedy `generate` on these ids. TTFT is until the first token is there; decode speed is of those after it."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max(1, new_tokens), eos_token_id=sorted(model.eos_ids) or None, pad_token_id=0,
    )  # fmt: skip
    prompt, times = torch.tensor([ids], device=model.device), _Times()
    with PeakMemory(model.device) as peak, torch.inference_mode():
        settle(model)
        started = time.perf_counter()
        plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=times,
            past_key_values=DynamicCache(config=plain.config),
        )  # fmt: skip
        settle(model)
    steps, decode_s = len(times.at) - 1, times.at[-1] - times.at[0]
    every_row = np.ones((model.geometry.layers, len(ids)), dtype=bool)
    return Sample(
        ttft_s=times.at[0] - started, rows=float(len(ids)), bytes_read=0, flops=link_flops(model, every_row, (), 0),
        decode_tokens_per_s=steps / decode_s if steps else None, peak_bytes=peak.bytes, tokens=tuple(times.tokens),
    )  # fmt: skip
