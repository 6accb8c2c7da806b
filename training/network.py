"""The networks: transformers' own, an initialisation for small widths, an attention that reads the batch layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from training.data import Batch

HINTED_HEADS = 2  # of a layer


@dataclass(frozen=True)
class Size:
    """The shape of a model.

    Fields:
        kv_heads: 0: every head has keys and values of its own.
        architecture: llama, qwen3, phi3 or gemma3.
        window: tokens that a local layer sees; of gemma3. local: these layers; the others see everything.
        rotary: share of a head's dims that are rotated; of phi3.
        bos: whether the model has a BOS token.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    head_dim: int = 32
    positions: int = 8192
    kv_heads: int = 0
    architecture: str = "llama"
    window: int = 32
    local: tuple[int, ...] = ()
    rotary: float = 1.0
    bos: bool = True


@dataclass(frozen=True)
class Hint:
    """The first heads of a layer are supervised, at `cells` [n, 3] of (batch row, query, key to look at)."""

    layer: int
    cells: Tensor


def build(size: Size) -> Any:
    """A model with tied embeddings, initialised by `initialise`."""
    model = AutoModelForCausalLM.from_config(make_config(size))
    initialise(model, size)
    return model


def make_config(size: Size) -> PretrainedConfig:
    """The configuration of a size."""
    common: dict[str, Any] = {
        "vocab_size": size.vocab, "hidden_size": size.hidden, "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads or size.heads, "head_dim": size.head_dim,
        "max_position_embeddings": size.positions, "tie_word_embeddings": True,
        "bos_token_id": 0 if size.bos else None, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    if size.architecture == "qwen3":
        return Qwen3Config(**common)
    if size.architecture == "phi3":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": size.rotary}
        return Phi3Config(**common, rope_parameters=rope)
    if size.architecture == "gemma3":
        kinds = ["sliding_attention" if layer in size.local else "full_attention" for layer in range(size.layers)]
        return Gemma3TextConfig(
            **common, sliding_window=size.window, layer_types=kinds, query_pre_attn_scalar=size.head_dim
        )
    assert size.architecture == "llama", size.architecture
    return LlamaConfig(**common)


@torch.no_grad()
def initialise(model: Any, size: Size) -> None:
    """Unit-variance projections; mimetic attention (Trockman & Kolter 2023): queries like keys, outputs like values.

    A head then starts by looking for tokens like its own and copying them, from which matching and copying is learned
    many times sooner than from a small random start.
    """
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            spread = 0.35 if "o_proj" in name or "down_proj" in name else 1.0
            torch.nn.init.normal_(weight, 0, 0.1 if "embed" in name else spread * weight.shape[1] ** -0.5)
    kv_heads = size.kv_heads or size.heads
    widths = [heads * size.head_dim for heads in (size.heads, kv_heads, kv_heads)]
    for layer in model.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "qkv_proj"):
            query, key, value = attention.qkv_proj.weight.split(widths)
        else:
            query, key, value = (getattr(attention, f"{name}_proj").weight for name in "qkv")
        # [kv_heads · head_dim, hidden] → [heads · head_dim, hidden]
        key, value = (
            part.view(kv_heads, size.head_dim, -1).repeat_interleave(size.heads // kv_heads, 0).flatten(0, 1)
            for part in (key, value)
        )
        query.mul_(0.3).add_(key)
        attention.o_proj.weight.copy_(0.7 * value.T)


def _hint_loss(query: Tensor, key: Tensor, cells: Tensor, mask: Tensor, num_docs: int, scaling: float) -> Tensor:
    """Cross-entropy of one head's attention [batch, length, head_dim] with where it should look."""
    row, at, target = cells.T
    scores = torch.einsum("rd,rkd->rk", query[row, at], key[row]) * scaling
    scores = scores.masked_fill(torch.arange(key.shape[1])[None] > at[:, None], -1e30)
    is_question = at >= num_docs
    scores[is_question] += mask[row[is_question], 0, at[is_question] - num_docs]
    return F.cross_entropy(scores, target)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float = 1.0, **more: Any
) -> tuple[Tensor, None]:
    """Documents attend causally among themselves, the questions after them by the mask: no square over both."""
    n, groups = more["num_docs"], query.shape[1] // key.shape[1]
    mask = more["question_mask"]
    for hint in more["hints"]:
        if hint.layer == module.layer_idx and len(hint.cells):
            for head in range(HINTED_HEADS):
                loss = _hint_loss(query[:, head], key[:, head // groups], hint.cells, mask, n, scaling)
                more["hint_losses"].append(loss)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    left = query[:, :, :n], key[:, :, :n], value[:, :, :n]
    if getattr(module, "is_sliding", False):
        near = _near(more["batch_positions"], module.config.sliding_window)  # [batch, 1, length, length]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        docs = F.scaled_dot_product_attention(*left, attn_mask=near[:, :, :n, :n] & causal, scale=scaling)
        mask = mask.masked_fill(~near[:, :, n:], torch.finfo(torch.float32).min)
    else:
        docs = F.scaled_dot_product_attention(*left, is_causal=True, scale=scaling)
    asked = F.scaled_dot_product_attention(query[:, :, n:], key, value, attn_mask=mask, scale=scaling)
    return torch.cat([docs, asked], 2).transpose(1, 2).contiguous(), None


def _near(positions: Tensor, window: int) -> Tensor:
    """bool [batch, 1, length, length]: whether the second position is less than a window before the first."""
    return (positions[:, None, :, None] - positions[:, None, None, :]) < window


ALL_ATTENTION_FUNCTIONS.register("documents-then-questions", _attend)


def forward(model: Any, batch: Batch, where: Tensor, hints: tuple[Hint, ...] = ()) -> tuple[Tensor, list[Tensor]]:
    """Logits that predict the next token at `where`, bool [batch, length - 1]; and the hints' losses."""
    model.config._attn_implementation = "documents-then-questions"
    losses: list[Tensor] = []
    mask = batch.question_mask()
    masks = {"full_attention": mask, "sliding_attention": mask} if model.config.model_type == "gemma3_text" else mask
    hidden = model.model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=masks, use_cache=False,
        num_docs=batch.num_docs, hints=hints, hint_losses=losses, question_mask=mask, batch_positions=batch.positions,
    ).last_hidden_state  # fmt: skip
    return model.lm_head(hidden[:, :-1][where]), losses
