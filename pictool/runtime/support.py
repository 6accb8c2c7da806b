"""Which architectures are supported: those that the exactness tests cover, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pictool.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Each is a row of the exactness tables in tests/. Yi and other Llama descendants carry the model type "llama".
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters of a model: one set, or one per layer type (Gemma 3)."""
    parameters = config.rope_parameters
    return [parameters] if "rope_type" in parameters else list(parameters.values())


def require_supported(config: PretrainedConfig, name: str) -> None:
    """Refuse a model that the exactness rules (docs/design.md §2) are not tested on.

    Raises:
        ModelError: unsupported architecture, RoPE type or attention variant.
    """
    if config.model_type not in SUPPORTED:
        raise ModelError(
            f"{name}: architecture {config.model_type!r} is not supported (supported: {', '.join(SUPPORTED)})"
        )
    for parameters in rope_parameters(config):
        if parameters["rope_type"] not in ROPE_TYPES:
            raise ModelError(
                f"{name}: RoPE type {parameters['rope_type']!r} is not supported ({', '.join(ROPE_TYPES)})"
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(f"{name}: bidirectional attention is not supported; a causal decoder is needed")


def max_positions(config: PretrainedConfig) -> int:
    """How many positions the model takes; linear and dynamic scaling stretch the configured number."""
    stretch = max(
        float(parameters.get("factor") or 1.0) if parameters["rope_type"] in ("linear", "dynamic") else 1.0
        for parameters in rope_parameters(config)
    )
    return int(config.max_position_embeddings * stretch)


def depends_on_length(config: PretrainedConfig) -> bool:
    """Whether the model's RoPE may rotate a position by another angle in a longer prompt."""
    return any(parameters["rope_type"] in ("dynamic", "longrope") for parameters in rope_parameters(config))


def rope_switch(config: PretrainedConfig) -> int | None:
    """The length at which long RoPE changes its frequencies (and with them every key), or None."""
    for parameters in rope_parameters(config):
        if parameters["rope_type"] == "longrope":
            return int(parameters["original_max_position_embeddings"])
    return None
