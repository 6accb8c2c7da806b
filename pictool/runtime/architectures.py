"""The architectures that are supported, and all that is known about them: the one module that tells them apart.

A family of a known kind is one line of `ARCHITECTURES`, and a row of the exactness tables in tests/. What a layer's
attention needs beside Q, K and V (scale, window, soft cap, learned sinks) comes from the layer itself, as
`transformers` passes it on; here is only what it does not pass on. What is refused, and why, is in `REFUSED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor
    from transformers import PretrainedConfig

Rotation = Callable[["ModuleType", "Tensor", "tuple[Tensor, ...]"], "Tensor"]


def _rotated_by_angles(modeling: ModuleType, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
    """By cos and sin: halves or interleaved pairs, all of a head or a part, as the model's own function has it."""
    rotated: Tensor = modeling.apply_rotary_pos_emb(x, x[:, :0], *table)[0]
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


def _always(attention: Any) -> bool:
    return True


@dataclass(frozen=True)
class Architecture:
    """How the layers of a family differ from Llama's, where they do not say so themselves.

    Fields:
        rotation: applies a rotary table to [batch, heads, positions, width] by the model's own function.
        is_rotated: whether an attention module rotates its queries and keys at all.
        embedding_scale: the field of the configuration that embeddings are multiplied by.
        counts_cached: whether a layer takes its rows' positions from the length of its cache.
    """

    rotation: Rotation = _rotated_by_angles
    is_rotated: Callable[[Any], bool] = _always
    embedding_scale: str | None = None
    counts_cached: bool = False


def chunk_of(attention: Any) -> int | None:
    """The size of the chunks in which an attention module attends, if it does (Llama 4)."""
    kinds = getattr(attention.config, "layer_types", None)
    is_chunked = kinds is not None and kinds[attention.layer_idx] == "chunked_attention"
    return int(attention.config.attention_chunk_size) if is_chunked else None


_PLAIN = Architecture()
_SCALED = Architecture(embedding_scale="embedding_multiplier")

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
    "cohere2": Architecture(is_rotated=lambda attention: attention.sliding_window is not None),
    "exaone4": Architecture(is_rotated=lambda attention: attention.sliding_window is None or attention.is_sliding),
    "seed_oss": _PLAIN,
    "ernie4_5": _PLAIN,
    "apertus": _PLAIN,
    "ministral3": _PLAIN,
    "starcoder2": _PLAIN,
    "smollm3": Architecture(is_rotated=lambda attention: bool(attention.use_rope)),
    "llama4_text": Architecture(
        _rotated_by_complex_before_heads, is_rotated=lambda attention: bool(attention.use_rope), counts_cached=True
    ),
    "mixtral": _PLAIN,
    "qwen3_moe": _PLAIN,
    "olmoe": _PLAIN,
    "granitemoe": _SCALED,
    "glm4_moe": _PLAIN,
    "minimax_m2": _PLAIN,
    "ernie4_5_moe": _PLAIN,
    "gpt_oss": _PLAIN,
}

# By model type: why a family that people ask for is refused.
REFUSED: Mapping[str, str] = {
    "stablelm": "its layers in transformers pass no arguments on to their attention function",
    "hunyuan_v1_dense": "it normalises keys after their rotation, so an un-rotated key cannot be kept",
    "hunyuan_v1_moe": "it normalises keys after their rotation, so an un-rotated key cannot be kept",
}


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The architecture of a supported model."""
    return ARCHITECTURES[config.model_type]
