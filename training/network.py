"""The networks: transformers' own, an initialisation for small widths, an attention that reads the batch layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pictool.runtime.architectures import geometry_of, mixer_of
from training.data import Batch
from training.hybrids import Spans, read_batches

HINTED_HEADS = 2  # of a layer
CHOSEN = 2  # experts that compute a row


@dataclass(frozen=True)
class Size:
    """The shape of a model.

    Fields:
        kv_heads: 0: every head has keys and values of its own.
        ffn: intermediate width that a row passes, of all chosen experts together.
        architecture: llama, qwen3, phi3, gemma3, qwen3_moe, gpt_oss, deepseek_v3, qwen3_5_text or bamba.
        window: tokens that a local layer sees; of gemma3 and gpt_oss. local: these layers; the others see everything.
        rotary: share of a head's dims that are rotated; of phi3.
        experts: of a layer, of which `CHOSEN` compute a row; of qwen3_moe and gpt_oss.
        latent: what keys and values are expanded from, of deepseek_v3: its keys have `head_dim` dims that are not
            rotated and as many that are, which all heads share.
        linear: layers that have a state instead of attention, of qwen3_5_text and bamba: of `heads` heads, each of
            `state` rows.
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
    experts: int = 0
    latent: int = 0
    linear: tuple[int, ...] = ()
    state: int = 16


@dataclass(frozen=True)
class Hint:
    """The first heads of a layer are supervised, at `cells` [n, 3] of (batch row, query, key to look at)."""

    layer: int
    cells: Tensor


def build(size: Size) -> Any:
    """A model with tied embeddings, initialised by `initialise`."""
    model = AutoModelForCausalLM.from_config(make_config(size))
    initialise(model, size)
    if size.linear:
        read_batches(model)
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
    if size.architecture == "deepseek_v3":
        return _with_latents(size, common)
    if size.experts:
        return _with_experts(size, common)
    if size.linear:
        return _with_states(size, common)
    if size.architecture == "qwen3":
        return Qwen3Config(**common)
    if size.architecture == "phi3":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": size.rotary}
        return Phi3Config(**common, rope_parameters=rope)
    if size.architecture == "gemma3":
        return Gemma3TextConfig(
            **common, sliding_window=size.window, layer_types=_layer_types(size), query_pre_attn_scalar=size.head_dim
        )
    assert size.architecture == "llama", size.architecture
    return LlamaConfig(**common)


def _layer_types(size: Size) -> list[str]:
    return ["sliding_attention" if layer in size.local else "full_attention" for layer in range(size.layers)]


def _with_experts(size: Size, common: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a mixture of experts. Only the eager experts have gradients on every CPU."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    common |= {"rope_parameters": rope, "num_experts_per_tok": CHOSEN, "experts_implementation": "eager"}
    one = size.ffn // CHOSEN
    if size.architecture == "qwen3_moe":
        return Qwen3MoeConfig(**common, num_experts=size.experts, moe_intermediate_size=one, norm_topk_prob=True)
    assert size.architecture == "gpt_oss", size.architecture
    common |= {"intermediate_size": one, "num_local_experts": size.experts}
    return GptOssConfig(**common, sliding_window=size.window, layer_types=_layer_types(size))


def _with_latents(size: Size, common: dict[str, Any]) -> PretrainedConfig:
    """The configuration of latent attention, without experts."""
    return DeepseekV3Config(
        **common, q_lora_rank=None, kv_lora_rank=size.latent, qk_nope_head_dim=size.head_dim,
        qk_rope_head_dim=size.head_dim, v_head_dim=size.head_dim, first_k_dense_replace=size.layers,
    )  # fmt: skip


def _with_states(size: Size, common: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a hybrid: Gated DeltaNet (Qwen3.5) or Mamba2 (Bamba)."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if size.architecture == "bamba":
        attention = [layer for layer in range(size.layers) if layer not in size.linear]
        return BambaConfig(
            **common, rope_parameters=rope, attn_layer_indices=attention, mamba_n_heads=size.heads, mamba_expand=1,
            mamba_d_state=size.state, mamba_chunk_size=32,
        )  # fmt: skip
    assert size.architecture == "qwen3_5_text", size.architecture
    quarter = size.head_dim // 8  # of the rotated half's pairs: sections of time, height and width
    rope |= {"partial_rotary_factor": 0.5, "mrope_section": [2 * quarter, quarter, quarter], "mrope_interleaved": True}
    kinds = ["linear_attention" if layer in size.linear else "full_attention" for layer in range(size.layers)]
    return Qwen3_5TextConfig(
        **common, rope_parameters=rope, layer_types=kinds, linear_num_key_heads=size.heads,
        linear_num_value_heads=size.heads, linear_key_head_dim=size.state, linear_value_head_dim=size.state,
    )  # fmt: skip


@torch.no_grad()
def initialise(model: Any, size: Size) -> None:
    """Unit-variance projections; mimetic attention (Trockman & Kolter 2023): queries like keys, outputs like values.

    A head then starts by looking for tokens like its own and copying them, from which matching and copying is learned
    many times sooner than from a small random start.
    """
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            spread = 0.35 if "o_proj" in name or "down_proj" in name else 1.0
            inputs = weight.shape[1 if weight.ndim == 2 or size.architecture == "gpt_oss" else 2]
            torch.nn.init.normal_(weight, 0, 0.1 if "embed" in name else spread * inputs**-0.5)
    for index, layer in enumerate(model.model.layers):
        if index in size.linear:
            _initialise_states(mixer_of(layer))
            continue
        attention = layer.self_attn
        query, key, value = _of_latents(attention, size) if size.latent else _of_heads(attention, size)
        query.mul_(0.3).add_(key.view_as(query))
        attention.o_proj.weight.copy_(0.7 * value.T)


def _initialise_states(mixer: Any) -> None:
    """A layer that at first reads its tokens as they are and adds little.

    Steps are 0.001 to 0.1, as in Mamba2, at rates of 1: some heads remember a page, and some a prompt.
    """
    mixer.dt_bias.copy_(torch.logspace(-3, -1, len(mixer.dt_bias)).expm1().log())  # softplus of which is the step
    mixer.A_log.zero_()
    mixer.conv1d.weight.mul_(0.1)[..., -1].add_(1)
    mixer.out_proj.weight.mul_(0.1)


def _of_heads(attention: Any, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of queries, and those of keys and values for each of their heads: [heads * head_dim, hidden]."""
    kv_heads = size.kv_heads or size.heads
    widths = [heads * size.head_dim for heads in (size.heads, kv_heads, kv_heads)]
    if hasattr(attention, "qkv_proj"):
        query, key, value = attention.qkv_proj.weight.split(widths)
    else:
        query, key, value = (getattr(attention, f"{name}_proj").weight for name in "qkv")
    if len(query) == 2 * widths[0]:  # each head's query is followed by a gate
        query = query.view(size.heads, 2 * size.head_dim, -1)[:, : size.head_dim]
    # [kv_heads * head_dim, hidden] -> [heads * head_dim, hidden]
    key, value = (
        part.view(kv_heads, size.head_dim, -1).repeat_interleave(size.heads // kv_heads, 0).flatten(0, 1)
        for part in (key, value)
    )
    return query, key, value


def _of_latents(attention: Any, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """The same of latent attention: what keys and values are expanded by, times what makes the latents."""
    latent, rotated = attention.kv_a_proj_with_mqa.weight.split([size.latent, size.head_dim])
    expanded = (attention.kv_b_proj.weight @ latent).view(size.heads, 2 * size.head_dim, size.hidden)
    key, value = expanded.split(size.head_dim, 1)
    key = torch.cat([key, rotated.expand(size.heads, -1, -1)], 1)
    return attention.q_proj.weight, key.flatten(0, 1), value.flatten(0, 1)


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
    seen, sinks = torch.ones(n, n, dtype=torch.bool).tril()[None, None], more.get("s_aux")
    if window := more.get("sliding_window"):
        near = _near(more["batch_positions"], window)  # [batch, 1, length, length]
        seen, mask = seen & near[:, :, :n, :n], mask.masked_fill(~near[:, :, n:], torch.finfo(torch.float32).min)
    if window or sinks is not None:
        docs = _weighted(*left, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf), scaling, sinks)
    else:
        docs = F.scaled_dot_product_attention(*left, is_causal=True, scale=scaling)
    asked = _weighted(query[:, :, n:], key, value, mask, scaling, sinks)
    return torch.cat([docs, asked], 2).transpose(1, 2).contiguous(), None


def _weighted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
    """Attention under an additive mask; a learned sink is the score of one more key, whose value is 0."""
    if sinks is not None:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        rows = mask.expand(-1, query.shape[1], -1, -1)  # [batch, heads, rows, keys]
        mask = torch.cat([rows, sinks.view(1, -1, 1, 1).expand(*rows.shape[:3], 1)], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _near(positions: Tensor, window: int) -> Tensor:
    """bool [batch, 1, length, length]: whether the second position is less than a window before the first."""
    return (positions[:, None, :, None] - positions[:, None, None, :]) < window


ALL_ATTENTION_FUNCTIONS.register("documents-then-questions", _attend)


def forward(model: Any, batch: Batch, where: Tensor, hints: tuple[Hint, ...] = ()) -> tuple[Tensor, list[Tensor]]:
    """Logits that predict the next token at `where`, bool [batch, length - 1]; and the hints' losses."""
    model.config._attn_implementation = "documents-then-questions"
    losses: list[Tensor] = []
    mask = batch.question_mask()
    masks: Any = mask
    if model.config.model_type in ("gemma3_text", "gpt_oss"):
        masks = {"full_attention": mask, "sliding_attention": mask}
    is_hybrid = geometry_of(model.config).states is not None
    if is_hybrid:
        masks = {"full_attention": mask, "linear_attention": None}
    hidden = model.model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=masks, use_cache=False,
        num_docs=batch.num_docs, hints=hints, hint_losses=losses, question_mask=mask, batch_positions=batch.positions,
        **({"spans": Spans.of(batch)} if is_hybrid else {}),
    ).last_hidden_state  # fmt: skip
    return model.lm_head(hidden[:, :-1][where]), losses
