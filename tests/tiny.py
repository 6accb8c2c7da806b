"""Tiny random models of every supported architecture, and a tokenizer, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

from pictool.runtime.architectures import ARCHITECTURES, auto_class, text_config

logging.set_verbosity_error()  # of RoPE with factors as small as these models
VOCAB = 320
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _long_rope() -> dict[str, Any]:
    more = {"short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 128}
    return {**_rope("longrope", partial_rotary_factor=0.5, **more), "original_max_position_embeddings": 128}


def _of(model_type: str, **more: Any) -> Callable[[], PretrainedConfig]:
    """A configuration of the common size, with fields of its own."""
    return lambda: AutoConfig.for_model(model_type, **{**SIZE, **more})


WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "router_jitter_noise": 0.0,
}  # fmt: skip

LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
    "v_head_dim": 10, "head_dim": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip

HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA: dict[str, Any] = HYBRID | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,  # a scan pads what it gets to whole ones
    "mamba_expand": 2,
}
MROPE: dict[str, Any] = _rope("default", mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=1.0)

# Every row of the exactness tables: name → configuration.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZE),
    "llama3": lambda: LlamaConfig(
        **SIZE,
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-linear": lambda: LlamaConfig(**SIZE, **_rope("linear", factor=2.0)),
    "llama-dynamic": lambda: LlamaConfig(**{**SIZE, "max_position_embeddings": 64}, **_rope("dynamic", factor=8.0)),
    "llama-yarn": lambda: LlamaConfig(**SIZE, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral-window": lambda: MistralConfig(**SIZE, sliding_window=12),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SIZE.items() if k != "head_dim"}, use_sliding_window=False),
    "qwen3": lambda: Qwen3Config(**SIZE),
    "phi3-partial": lambda: Phi3Config(**{**SIZE, **_rope("default", partial_rotary_factor=0.5)}),
    "phi3-long": lambda: Phi3Config(**{**SIZE, **_long_rope()}),
    "gemma2": lambda: Gemma2Config(**SIZE, sliding_window=12, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZE,
        sliding_window=12,
        query_pre_attn_scalar=8,
        layer_types=WINDOWED,
    ),
    "granite": _of(
        "granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.5
    ),
    "olmo2": _of("olmo2"),
    "olmo3": _of("olmo3", sliding_window=12, layer_types=WINDOWED),
    "glm4": _of("glm4", **_rope("default", partial_rotary_factor=0.5)),
    "cohere2": _of("cohere2", sliding_window=12, layer_types=WINDOWED, logit_scale=0.5),
    "exaone4": _of("exaone4", sliding_window=12, layer_types=WINDOWED),
    "seed_oss": _of("seed_oss"),
    "ernie4_5": _of("ernie4_5"),
    "apertus": _of("apertus"),
    "ministral3": _of(
        "ministral3",
        **_rope("yarn", factor=4.0, original_max_position_embeddings=512, llama_4_scaling_beta=0.1),
        sliding_window=12,
    ),
    "ministral3-far": _of(
        "ministral3", **_rope("yarn", factor=4.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.5)
    ),
    "starcoder2": _of("starcoder2", sliding_window=12),
    "smollm3": _of("smollm3", no_rope_layers=[1, 0, 1], use_sliding_window=False),
    "llama4": _of(
        "llama4_text", **EXPERTS, intermediate_size_mlp=48, attention_chunk_size=32, no_rope_layers=[1, 0, 1],
        moe_layers=[1], attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1, use_qk_norm=True,
    ),
    "llama4-tuned": _of(
        "llama4_text", **EXPERTS, intermediate_size_mlp=48, attention_chunk_size=20, no_rope_layers=[1, 0, 1],
        moe_layers=[1], attn_temperature_tuning=True, floor_scale=16, attn_scale=0.5, use_qk_norm=False,
    ),
    "mixtral": _of("mixtral", **EXPERTS),
    "qwen3_moe": _of("qwen3_moe", **EXPERTS),
    "olmoe": _of("olmoe", **EXPERTS, clip_qkv=2.0),
    "granitemoe": _of(
        "granitemoe", **EXPERTS, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7,
        attention_multiplier=0.5,
    ),
    "glm4_moe": _of("glm4_moe", **EXPERTS, first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=True),
    "minimax_m2": _of("minimax_m2", **EXPERTS),
    "ernie4_5_moe": _of(
        "ernie4_5_moe", **EXPERTS, moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_layer_interval=1
    ),
    "deepseek_v2": _of("deepseek_v2", **EXPERTS, **LATENTS, topk_method="greedy"),
    "deepseek_v3": _of("deepseek_v3", **EXPERTS, **LATENTS),
    "deepseek_v3-yarn": _of(
        "deepseek_v3", **EXPERTS, **{**LATENTS, "q_lora_rank": None}, rope_interleave=False,
        **_rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7),
    ),
    "glm4_moe_lite": _of(
        "glm4_moe_lite", **EXPERTS, **LATENTS, mlp_layer_types=["dense", "sparse", "sparse"], rope_interleave=True
    ),
    "mistral4": _of(
        "mistral4", **EXPERTS, **{**LATENTS, "head_dim": 14},
        **_rope(
            "yarn", factor=4.0, original_max_position_embeddings=512, llama_4_scaling_beta=0.1,
            partial_rotary_factor=8 / 14,
        ),
    ),
    "gpt_oss": _of("gpt_oss", **EXPERTS, sliding_window=12, layer_types=WINDOWED),
    "qwen3_next": _of("qwen3_next", **EXPERTS, **DELTA, shared_expert_intermediate_size=16),
    "qwen3_5": _of("qwen3_5_text", **DELTA, **MROPE),
    "qwen3_5_moe": _of("qwen3_5_moe_text", **EXPERTS, **DELTA, **MROPE, shared_expert_intermediate_size=16),
    "olmo_hybrid": _of("olmo_hybrid", **DELTA),
    "olmo_hybrid-unrotated": _of("olmo_hybrid", **DELTA, **_rope("default", rope_theta=None)),
    "bamba": _of("bamba", **MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": _of("granitemoehybrid", **EXPERTS, **MAMBA, **HYBRID, shared_intermediate_size=16),
    "granitemoehybrid-rope": _of(
        "granitemoehybrid", **EXPERTS, **MAMBA, **HYBRID, shared_intermediate_size=16, position_embedding_type="rope",
        embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.5,
    ),
    "falcon_h1": _of("falcon_h1", **MAMBA, mamba_d_ssm=64, embedding_multiplier=2.0, lm_head_multiplier=0.5),
    "nemotron_h": _of(
        "nemotron_h", **EXPERTS, mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=12, n_groups=2, chunk_size=16,
        layers_block_type=["linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
        moe_shared_expert_intermediate_size=16,
    ),
    "lfm2": _of("lfm2", layer_types=["conv", "conv", "full_attention"]),
    "lfm2_moe": _of("lfm2_moe", **EXPERTS, layer_types=["conv", "conv", "full_attention"], num_dense_layers=1),
}  # fmt: skip


def _known(rows: dict[str, Callable[[], PretrainedConfig]]) -> dict[str, Callable[[], PretrainedConfig]]:
    """The rows, each named by its model type, of which `transformers` has that type: older ones lack some."""
    return {name: row for name, row in rows.items() if name.removeprefix("in ").partition("-")[0] in CONFIG_MAPPING}


CONFIGS |= _known({
    "kimi_linear": _of(
        "kimi_linear", **EXPERTS, **LATENTS, **HYBRID, linear_head_dim=8, linear_num_heads=4,
        mlp_layer_types=["sparse", "dense", "dense"],
    ),
    "exaone": _of("exaone"),
    "internlm3": _of("internlm3"),
    "iquestcoder": _of("iquestcoder"),
    "apertus1p5_text": _of("apertus1p5_text"),
    "apertus1p5_text-pruned": _of("apertus1p5_text", output_vocab_size=300),
    "sarvam_moe": _of("sarvam_moe", **EXPERTS, first_k_dense_replace=1, n_group=1, topk_group=1),
    "flint": _of(
        "flint", **EXPERTS, sliding_window=12, layer_types=WINDOWED, mlp_only_layers=[0],
        shared_expert_intermediate_size=16,
    ),
    "kolibri1": _of("kolibri1", **EXPERTS, sliding_window=12, layer_types=WINDOWED, shared_expert_intermediate_size=16),
    "sarvam_mla": _of("sarvam_mla", **EXPERTS, **LATENTS),
    "lara_mini": _of(
        "lara_mini", **EXPERTS, **DELTA | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
        sliding_window=12, shared_expert_intermediate_size=16,
    ),
    "lfm3": _of("lfm3", layer_types=["conv", "sliding_attention", "full_attention"], sliding_window=12),
    "bailing_hybrid": _of(
        "bailing_hybrid", **EXPERTS | {"num_experts_per_tok": 4}, **LATENTS, **HYBRID, num_shared_experts=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
        kda_lower_bound=-0.02,  # gates that remember; of all experts no near tie is decided by rounding
    ),
})  # fmt: skip

# Rows only within a wrapper: transformers has no class for them alone.
_WITHIN: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_vl": _of(
        "qwen3_vl_text", **_rope("default", mrope_section=[2, 1, 1], mrope_interleaved=True), tie_word_embeddings=False
    ),
    "qwen3_vl_moe": _of(
        "qwen3_vl_moe_text",
        **EXPERTS,
        **_rope("default", mrope_section=[2, 1, 1], mrope_interleaved=True),
    ),
}


def _wrapped(model_type: str, text: str, **more: Any) -> Callable[[], PretrainedConfig]:
    """A model of images and text, of which the text part is the row of this name."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
              "num_heads": 2, "image_size": 16, "patch_size": 8, "out_hidden_size": 32}  # fmt: skip
    return lambda: AutoConfig.for_model(
        model_type,
        text_config={**CONFIGS, **_WITHIN}[text]().to_dict(),
        **{"vision_config": vision} | more,
        tie_word_embeddings=False,
    )


# Tokens in whose place images go: bytes that no text in UTF-8 holds.
_IMAGE, _VIDEO, _BEGIN, _END = 190, 189, 188, 128
CONFIGS |= {
    "in gemma3": _wrapped("gemma3", "gemma3", image_token_index=_IMAGE, boi_token_index=_BEGIN, eoi_token_index=_END),
    "in mistral3": _wrapped("mistral3", "mistral4", image_token_index=_IMAGE),
    "in llama4": _wrapped("llama4", "llama4", image_token_index=_IMAGE, boi_token_index=_BEGIN, eoi_token_index=_END),
    "in qwen3_vl": _wrapped("qwen3_vl", "qwen3_vl", image_token_id=_IMAGE, video_token_id=_VIDEO),
    "in qwen3_vl_moe": _wrapped("qwen3_vl_moe", "qwen3_vl_moe", image_token_id=_IMAGE, video_token_id=_VIDEO),
    "in qwen3_5": _wrapped("qwen3_5", "qwen3_5", image_token_id=_IMAGE, video_token_id=_VIDEO),
    "in qwen3_5_moe": _wrapped("qwen3_5_moe", "qwen3_5_moe", image_token_id=_IMAGE, video_token_id=_VIDEO),
    "in kimi_k25": _wrapped("kimi_k25", "deepseek_v3", image_token_id=_IMAGE),
}
CONFIGS |= _known({
    "in lfm3_vl": _wrapped("lfm3_vl", "lfm3", image_token_id=_IMAGE, video_token_id=_VIDEO),
    "in apertus1p5": _wrapped(
        "apertus1p5", "apertus1p5_text", image_token_id=_IMAGE, audio_token_id=_VIDEO, image_token_offset=300,
        audio_token_offset=304,
        vision_config={
            "codebook_size": 4, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1,
        },
        audio_config={
            "model_type": "wavtokenizer_encoder", "codebook_size": 4, "hidden_size": 16, "codebook_dim": 16,
            "num_filters": 4,
        },
    ),
})  # fmt: skip


HYBRIDS = [
    name for name, config in CONFIGS.items() if ARCHITECTURES[text_config(config()).model_type].states is not None
]


def random_module(config: PretrainedConfig, seed: int = 0, std: float = 0.15) -> Any:
    """A model with an init so large that context matters: a wrong row is a wrong answer."""
    torch.manual_seed(seed)
    module = auto_class(config).from_config(config).eval()
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):  # gates that remember: a state is not forgotten within a chunk
            torch.nn.init.uniform_(parameter, -6.0, -3.0)
        elif name.endswith("dt_bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, 0.0 if "gemma" in config.model_type else 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, std)
    return module


TEXT = """The harbour was quiet. It holds a festival in the spring; nobody knows why. "Really?" she asked.
Numbers such as 1,024 or 3.14 stand here too, and words: naïve, Straße, 東京, emoji 🙂, tabs\tand\nlines. """


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )  # fmt: skip


def save_model(directory: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """A model directory as `transformers` writes it."""
    random_module(config, seed).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
