"""GGUF files of models in memory, written with gguf-py: the embedded model, and tiny random ones. No download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from numpy.typing import NDArray
from transformers import (
    DeepseekV2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZE: dict[str, Any] = {**tiny.SIZE, "head_dim": 16, "hidden_size": 64, "max_position_embeddings": 1024}
_MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_WINDOW = 12
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}\n{% endfor %}"
    "[assistant]"
)
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
}  # fmt: skip


def _layers(count: int) -> dict[str, Any]:
    return {**SIZE, "num_hidden_layers": count}


# Every row of the exactness tables: name → configuration.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZE),
    "llama-yarn": lambda: LlamaConfig(**SIZE, rope_parameters=_YARN),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SIZE.items() if k != "head_dim"}, use_sliding_window=False),
    "qwen3": lambda: Qwen3Config(**SIZE),
    "qwen3moe": lambda: Qwen3MoeConfig(**SIZE, **_MOE, num_experts=4, decoder_sparse_step=1, norm_topk_prob=True),
    "gemma3": lambda: Gemma3TextConfig(
        **_layers(7), sliding_window=_WINDOW, query_pre_attn_scalar=16,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(7)],
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_layers(4), num_local_experts=4, num_experts_per_tok=2, sliding_window=_WINDOW, rope_parameters=_YARN
    ),
    "deepseek2": lambda: DeepseekV2Config(
        **{**SIZE, "head_dim": 8, "num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=3, n_routed_experts=4, n_shared_experts=1, **_MOE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2"}
_ROPE_OF = {"gemma3": "full_attention"}


def random_module(name: str, seed: int = 0) -> Any:
    """A tiny model whose weights are so large that context matters."""
    config = CONFIGS[name]()
    return tiny.random_module(config, seed, std=0.12)


class GgmlGelu(torch.nn.Module):
    """GELU as ggml computes it on a CPU: from a table of float16 numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, half))


def reference_module(module: Any) -> Any:
    """The same model on transformers, with ggml's GELU where it has one."""
    module.set_attn_implementation("eager")
    for layer in module.model.layers:
        if "gelu" in type(getattr(layer.mlp, "act_fn", None)).__name__.lower():
            layer.mlp.act_fn = GgmlGelu()
    return module


def write_gguf(
    path: Path, module: Any, tokenizer: Any, quantize: str | None = None, template: str | None = None
) -> Path:
    """Write a model as a GGUF file in float32, or its matrices in another of gguf-py's types, as ``Q8_0``."""
    import gguf

    architecture = _ARCHITECTURES.get(module.config.model_type, module.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, architecture, module.config)
    _write_tokenizer(writer, tokenizer, module.config.vocab_size)
    if template is not None:
        writer.add_chat_template(template)
    kind = None if quantize is None else gguf.GGMLQuantizationType[quantize]
    for name, data in _tensors(gguf, architecture, module):
        if kind is not None and data.ndim == 2 and data.shape[-1] % 32 == 0 and "norm" not in name:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: Any, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "deepseek2":
        _write_latent(writer, config)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if architecture in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("qwen3moe", "gpt-oss"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    rope = config.rope_parameters
    rope = rope if "rope_type" in rope else rope[_ROPE_OF[architecture]]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_latent(writer: Any, config: Any) -> None:
    """Multi-head latent attention, with one head of keys that holds the values too."""
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(1.0)


def _write_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    import json

    import gguf

    data = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    by_id = {token: text for text, token in vocabulary.items()}
    special = {entry["id"] for entry in data["added_tokens"] if entry["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(token, f"<unused{token}>") for token in range(size)])
    kinds = gguf.TokenType
    writer.add_token_types([
        kinds.CONTROL if token in special else kinds.NORMAL if token in by_id else kinds.UNUSED for token in range(size)
    ])  # fmt: skip
    merges = data["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(True)


def _tensors(gguf: Any, architecture: str, module: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    config = module.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, value in _parts(architecture, config, name, tensor.detach().float()):
            stem, _, suffix = part.rpartition(".")
            if part.endswith(("_proj", "sinks", "_bias")):
                stem, suffix = part, ""
            mapped = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert mapped is not None, (part, stem, suffix)
            yield mapped, np.ascontiguousarray(value.numpy())


def _parts(architecture: str, config: Any, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor as llama.cpp has it: some are permuted, shifted or split."""
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        yield name, value.view(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
    elif architecture == "gemma3" and "norm" in name:
        yield name, value + 1
    elif name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        gate, up = _halves(architecture, value)
        yield f"{stem}gate_proj.weight", gate
        yield f"{stem}up_proj.weight", up
    elif name.endswith("experts.gate_up_proj_bias"):
        stem = name.removesuffix("gate_up_proj_bias")
        yield f"{stem}gate_proj.bias", value[:, ::2]
        yield f"{stem}up_proj.bias", value[:, 1::2]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", value.transpose(1, 2) if architecture == "gpt-oss" else value
    elif name.endswith("experts.down_proj_bias"):
        yield name.removesuffix("_bias") + ".bias", value
    elif name.endswith("self_attn.sinks"):
        yield f"{name}.weight", value
    elif name.endswith("kv_b_proj.weight"):
        heads = value.view(config.num_key_value_heads, config.qk_nope_head_dim + config.v_head_dim, -1)
        key, values = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
        yield name.replace("kv_b_proj", "k_b_proj"), key.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        yield name, value


def _halves(architecture: str, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up projections of all experts, [experts, intermediate, hidden]."""
    if architecture == "gpt-oss":
        return value[:, :, ::2].transpose(1, 2), value[:, :, 1::2].transpose(1, 2)
    gate, up = value.chunk(2, 1)
    return gate, up
