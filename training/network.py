"""The network: transformers' Llama, an initialisation for small widths, an attention that reads the batch layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from training.data import Batch


@dataclass(frozen=True)
class Size:
    """The shape of an embedded model; every head has keys and values of its own."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    head_dim: int = 32
    positions: int = 8192


@dataclass(frozen=True)
class Hint:
    """Heads (layer, head) whose attention is supervised, at `cells` [n, 3] of (batch row, query, key to look at)."""

    heads: tuple[tuple[int, int], ...]
    cells: Tensor


def build(size: Size) -> Any:
    """A Llama with tied embeddings, initialised by `initialise`."""
    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.ffn, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, head_dim=size.head_dim,
        max_position_embeddings=size.positions, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    initialise(model, size)
    return model


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
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight.mul_(0.3).add_(attention.k_proj.weight)
        attention.o_proj.weight.copy_(0.7 * attention.v_proj.weight.T)


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
    n = more["num_docs"]
    for hint in more["hints"]:
        for layer, head in hint.heads:
            if layer == module.layer_idx and len(hint.cells):
                loss = _hint_loss(query[:, head], key[:, head], hint.cells, attention_mask, n, scaling)
                more["hint_losses"].append(loss)
    left = query[:, :, :n], key[:, :, :n], value[:, :, :n]
    docs = F.scaled_dot_product_attention(*left, is_causal=True, scale=scaling)
    asked = F.scaled_dot_product_attention(query[:, :, n:], key, value, attn_mask=attention_mask, scale=scaling)
    return torch.cat([docs, asked], 2).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("documents-then-questions", _attend)


def forward(model: Any, batch: Batch, where: Tensor, hints: tuple[Hint, ...] = ()) -> tuple[Tensor, list[Tensor]]:
    """Logits that predict the next token at `where`, bool [batch, length - 1]; and the hints' losses."""
    model.config._attn_implementation = "documents-then-questions"
    losses: list[Tensor] = []
    hidden = model.model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=batch.question_mask(), use_cache=False,
        num_docs=batch.num_docs, hints=hints, hint_losses=losses,
    ).last_hidden_state  # fmt: skip
    return model.lm_head(hidden[:, :-1][where]), losses
