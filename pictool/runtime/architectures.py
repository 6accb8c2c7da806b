"""The architectures that are supported, and all that is known about them: the one module that tells them apart.

A family of a known kind is one line of `ARCHITECTURES`, and a row of the exactness tables in tests/. What a layer's
attention needs beside Q, K and V (scale, window, soft cap, learned sinks) comes from the layer itself, as
`transformers` passes it on; here is only what it does not pass on. What is refused, and why, is in `REFUSED`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.core import Geometry, KVPart, StateShape, standard_parts
from pictool.errors import ModelError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor
    from transformers import PretrainedConfig

Rotation = Callable[["ModuleType", "Tensor", "tuple[Tensor, ...]"], "Tensor"]


def _rotated_by_angles(modeling: ModuleType, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
    """By cos and sin: halves or interleaved pairs, all of a head or a part, as the model's own function has it."""
    rotated: Tensor = modeling.apply_rotary_pos_emb(x, x[:, :0], *table)[0]
    return rotated


def _rotated_from_halves(modeling: ModuleType, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
    """By cos and sin, by a function that takes interleaved pairs and returns halves, as it returned these (Ling 3)."""
    pairs = x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)  # [a, b, c, d] → [a, c, b, d]
    rotated: Tensor = modeling.apply_rotary_pos_emb_interleave(pairs, pairs[:, :0], *table)[0]
    return rotated


def _rotated_by_complex(modeling: ModuleType, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
    """By complex numbers, of pairs of neighbours (DeepSeek V2)."""
    rotated: Tensor = modeling.apply_rotary_emb(x, x[:, :1], *table)[0]
    return rotated


def _rotated_by_complex_before_heads(modeling: ModuleType, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
    """The same, by a function that takes [batch, positions, heads, width] (Llama 4)."""
    by_token = x.transpose(1, 2)
    rotated: Tensor = modeling.apply_rotary_emb(by_token, by_token[:, :, :1], *table)[0]
    return rotated.transpose(1, 2)


def heads_of(config: Any) -> tuple[KVPart, ...]:
    """The keys and values of standard attention."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return standard_parts(config.num_key_value_heads, head_dim)


def latents_of(config: Any) -> tuple[KVPart, ...]:
    """Latent attention (DeepSeek): what keys and values are expanded from, and a rotated key that all heads share."""
    latent = KVPart("latent", 1, config.kv_lora_rank, False)
    return latent, KVPart("rope_key", 1, config.qk_rope_head_dim, True)


def delta_states_of(config: Any) -> StateShape:
    """Gated DeltaNet: a state of d_k × d_v a head, and an operator of d_k × d_k."""
    heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * keys + heads * values
    return StateShape(num_linear(config), channels, config.linear_conv_kernel_dim - 1, heads, keys, values, keys)


def mamba_states_of(config: Any) -> StateShape:
    """Mamba2: a state of head_dim × d_state a head; its operator is one number, the product of decays."""
    heads, width, size = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    channels = heads * width + 2 * config.mamba_n_groups * size
    return StateShape(num_linear(config), channels, config.mamba_d_conv - 1, heads, width, size, 1)


def nemotron_states_of(config: Any) -> StateShape:
    """The same, by other names (Nemotron-H). Its steps of one token ignore `time_step_min`, as `generate` does."""
    heads, width, size = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    channels = heads * width + 2 * config.n_groups * size
    return StateShape(num_linear(config), channels, config.conv_kernel - 1, heads, width, size, 1)


def kimi_states_of(config: Any) -> StateShape:
    """Kimi's delta attention: as a Gated DeltaNet, with a decay per channel."""
    heads, width = config.linear_num_heads, config.linear_head_dim
    columns = config.linear_conv_kernel_dim - 1
    return StateShape(num_linear(config), 3 * heads * width, columns, heads, width, width, width)


def convolution_states_of(config: Any) -> StateShape:
    """A short convolution alone (LFM2)."""
    return StateShape(num_linear(config), config.hidden_size, config.conv_L_cache - 1)


def _always(attention: Any) -> bool:
    return True


@dataclass(frozen=True)
class Architecture:
    """How the layers of a family differ from Llama's, where they do not say so themselves.

    Fields:
        rotation: applies a rotary table to [batch, heads, positions, width] by the model's own function.
        is_rotated: whether an attention module rotates its queries and keys at all; None: a layer without one.
        embedding_scale: the field of the configuration that embeddings are multiplied by.
        counts_cached: whether a layer takes its rows' positions from the length of its cache.
        parts: what a layer keeps of every token, from a configuration.
        states: of a hybrid, what its linear layers keep at a cut, from a configuration.
        rope_needs: fields of the RoPE parameters that its attention reads whatever the type of RoPE.
        norm, rotary: the names of the decoder's last norm and rotary embedding; it has none if that is None.
    """

    rotation: Rotation = _rotated_by_angles
    is_rotated: Callable[[Any], bool] = _always
    embedding_scale: str | None = None
    counts_cached: bool = False
    parts: Callable[[Any], tuple[KVPart, ...]] = heads_of
    states: Callable[[Any], StateShape] | None = None
    rope_needs: tuple[str, ...] = ()
    norm: str = "norm"
    rotary: str | None = "rotary_emb"


def layer_kinds(config: Any) -> list[str]:
    """What each decoder layer of a hybrid does: ``full_attention``, ``sliding_attention``, ``linear_attention``,
    ``conv`` or ``hybrid``.
    """
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    return [str(kind) for kind in kinds]


def num_linear(config: Any) -> int:
    """How many layers have a state."""
    return sum(is_linear(kind) for kind in layer_kinds(config))


def is_linear(kind: str) -> bool:
    """Whether layers of a kind (`layer_kinds`) have a state."""
    return kind in ("linear_attention", "conv", "hybrid")


def has_attention(kind: str) -> bool:
    """Whether layers of a kind (`layer_kinds`) have keys and values."""
    return kind in ("full_attention", "sliding_attention", "hybrid")


def chunk_of(attention: Any) -> int | None:
    """The size of the chunks in which an attention module attends, if it does (Llama 4)."""
    kinds = getattr(attention.config, "layer_types", None)
    is_chunked = kinds is not None and kinds[attention.layer_idx] == "chunked_attention"
    return int(attention.config.attention_chunk_size) if is_chunked else None


_PLAIN = Architecture()
_LATENT = Architecture(parts=latents_of)
_SCALED = Architecture(embedding_scale="embedding_multiplier")
_DELTA = Architecture(states=delta_states_of)
_IN_WINDOWS = Architecture(is_rotated=lambda attention: attention.sliding_window is not None)
_IN_WINDOWS_IF_ANY = Architecture(is_rotated=lambda attention: attention.sliding_window is None or attention.is_sliding)
_BY_POSITION = ("llama_4_scaling_beta", "original_max_position_embeddings")  # by which queries are scaled

# By model type. Yi and other Llama descendants have the type "llama".
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "phi3": _PLAIN,
    "gemma2": _PLAIN,
    "gemma3_text": _PLAIN,
    "granite": _SCALED,
    "olmo2": _PLAIN,
    "olmo3": _PLAIN,
    "glm4": _PLAIN,
    "cohere2": _IN_WINDOWS,
    "exaone": _PLAIN,
    "exaone4": _IN_WINDOWS_IF_ANY,
    "seed_oss": _PLAIN,
    "ernie4_5": _PLAIN,
    "apertus": _PLAIN,
    "apertus1p5_text": _PLAIN,
    "internlm3": _PLAIN,
    "iquestcoder": _PLAIN,
    "ministral3": Architecture(rope_needs=_BY_POSITION),
    "starcoder2": _PLAIN,
    "smollm3": Architecture(is_rotated=lambda attention: bool(attention.use_rope)),
    "llama4_text": Architecture(
        _rotated_by_complex_before_heads,
        is_rotated=lambda attention: bool(attention.use_rope),
        counts_cached=True,
    ),
    "mixtral": _PLAIN,
    "qwen3_moe": _PLAIN,
    "olmoe": _PLAIN,
    "granitemoe": _SCALED,
    "glm4_moe": _PLAIN,
    "minimax_m2": _PLAIN,
    "ernie4_5_moe": _PLAIN,
    "gpt_oss": _PLAIN,
    "sarvam_moe": _PLAIN,
    "flint": _IN_WINDOWS,
    "kolibri1": _IN_WINDOWS_IF_ANY,
    "deepseek_v2": Architecture(_rotated_by_complex, parts=latents_of),
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "sarvam_mla": _LATENT,
    "mistral4": Architecture(parts=latents_of, rope_needs=_BY_POSITION),
    "qwen3_vl_text": _PLAIN,
    "qwen3_vl_moe_text": _PLAIN,
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "lara_mini": Architecture(
        is_rotated=lambda attention: attention is None or attention.sliding_window is not None, states=delta_states_of
    ),
    "bamba": Architecture(states=mamba_states_of, norm="final_layernorm"),
    "granitemoehybrid": Architecture(embedding_scale="embedding_multiplier", states=mamba_states_of),
    "falcon_h1": Architecture(embedding_scale="embedding_multiplier", states=mamba_states_of, norm="final_layernorm"),
    "lfm2": Architecture(states=convolution_states_of, norm="embedding_norm"),
    "lfm2_moe": Architecture(states=convolution_states_of, norm="embedding_norm", rotary="pos_emb"),
    "lfm3": Architecture(states=convolution_states_of, norm="embedding_norm"),
    "nemotron_h": Architecture(states=nemotron_states_of, norm="norm_f", rotary=None),
    "kimi_linear": Architecture(parts=latents_of, states=kimi_states_of, rotary=None),
    "bailing_hybrid": Architecture(_rotated_from_halves, parts=latents_of, states=kimi_states_of),
}

# Those that the connector for vLLM is tested with.
IN_VLLM = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "granite", "glm4", "ernie4_5", "mixtral",
    "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v2", "deepseek_v3",
)  # fmt: skip

# Models of images and text by their own type: the language model within is run, if its type is one of the above.
WRAPPERS = (
    "gemma3", "mistral3", "llama4", "qwen3_vl", "qwen3_vl_moe", "kimi_k25", "qwen3_5", "qwen3_5_moe", "lfm3_vl",
    "apertus1p5",
)  # fmt: skip

_NORM_AFTER_ROPE = "it normalises keys after their rotation, so an un-rotated key cannot be kept"
_INDEXER = "its sparse attention keeps the keys of an indexer beside the latents, rotated differently"
_LINEAR = "its linear attention layers keep a kind of state that is not tested"
_SHARED_KV = "layers share the KV of others, and every layer has its own embeddings"
_GEMMA_4 = "its layers differ in their heads; in small sizes they share KV and have their own embeddings"

# By model type: why a family that people ask for is refused.
REFUSED: Mapping[str, str] = {
    "stablelm": "its layers in transformers do not pass arguments on to their attention function",
    "hunyuan_v1_dense": _NORM_AFTER_ROPE,
    "hunyuan_v1_moe": _NORM_AFTER_ROPE,
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "mistral_large4": _INDEXER,
    "dots3_note": _INDEXER,
    "deepseek_v4": "it rotates values, keeps compressed blocks instead of tokens, and has hyper-connections",
    "glm5_next": _LINEAR,
    "gemma3n": _SHARED_KV,
    "gemma3n_text": _SHARED_KV,
    "gemma4": _GEMMA_4,
    "gemma4_text": _GEMMA_4,
    "gemma4_unified": _GEMMA_4,
    "beam": "layers that do not rotate get a scale for their queries from the model, by position",
    "dory": "it runs the same layers several times, each time with KV of its own",
    "inkling2": "its attention adds a bias by distance to the scores, and its keys and values are convolved",
    "jamba": "in transformers a step of several tokens ignores the state of its Mamba layers",
}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model: of a wrapper that within, else its own."""
    if config.model_type not in WRAPPERS:
        return config
    inner: PretrainedConfig = config.get_text_config()
    return inner


def language_model_of(module: Any) -> Any:
    """The module that has the decoder and its head: itself, or the language model in a wrapper (Llama 4)."""
    return module._modules.get("language_model", module)


def decoder_of(module: Any) -> Any:
    """The decoder of a model: embedding, layers, norm and rotary embedding."""
    inner = language_model_of(module).model
    return inner._modules.get("language_model", inner)


def require_no_states(config: Any, what: str) -> None:
    """Refuse what is not done with hybrids. Raises ModelError: `what` says it."""
    if architecture_of(config).states is not None:
        raise ModelError(f"{what}: {config.model_type} is a hybrid, whose linear layers have states; not supported")


def cache_name(module: Any) -> str:
    """What a module calls its cache: ``cache`` from transformers 5.24 on, before that by what it keeps there."""
    names = inspect.signature(type(module).forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


def rotary_of(decoder: Any) -> Any:
    """The rotary embedding of a decoder; None if its attention is not rotated."""
    name = architecture_of(decoder.config).rotary
    return None if name is None else getattr(decoder, name)


def keep_language_model(module: Any) -> None:
    """Drop what a wrapper has for images from memory."""
    from torch import nn

    decoder, language = decoder_of(module), language_model_of(module)
    for parent in (module, language.model):
        for name, child in parent.named_children():
            if parent is not decoder and child not in (decoder, language, language.model, language.lm_head):
                setattr(parent, name, nn.Identity())


def image_tokens(config: PretrainedConfig) -> frozenset[int]:
    """The token ids in whose place a wrapper puts images, videos or sounds."""
    names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
    ids = (getattr(config, name, None) for name in names if config.model_type in WRAPPERS)
    return frozenset(token for token in ids if isinstance(token, int))


def auto_class(config: PretrainedConfig) -> Any:
    """The class of `transformers` that makes a model of this configuration."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    is_mapped = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_mapped else AutoModelForCausalLM


def geometry_of(config: PretrainedConfig) -> Geometry:
    """The shape of a supported model's KV, and of its linear layers' states."""
    architecture, layers = architecture_of(config), config.num_hidden_layers
    key, value = architecture.parts(config)
    states = None if architecture.states is None else architecture.states(config)
    if states is not None:
        layers = sum(map(has_attention, layer_kinds(config)))
    if (key, value) == standard_parts(key.heads, key.width):
        return Geometry(layers, key.heads, key.width, states=states)
    return Geometry(layers, others=(key, value), states=states)


def mixer_of(layer: Any) -> Any:
    """The module of a decoder layer that has a state: the one with a short convolution; None if there is none."""
    from torch import nn

    return next((part for part in layer.modules() if any(isinstance(c, nn.Conv1d) for c in part.children())), None)


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The architecture of a supported model."""
    return ARCHITECTURES[config.model_type]
