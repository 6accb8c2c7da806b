"""What is supported: the architectures that the exactness tests cover, and a `transformers` that has what is called."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from pictool.errors import ModelError
from pictool.needs import Needs, missing
from pictool.reading import shown
from pictool.runtime.architectures import (
    ARCHITECTURES,
    IN_VLLM,
    REFUSED,
    WRAPPERS,
    has_attention,
    is_linear,
    layer_kinds,
    text_config,
)
from pictool.runtime.machine import installed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_MAX_SIZE = 2**31 - 1
_LAYER_TYPES = (
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"
)  # fmt: skip
# RoPE parameters, and whether each may be 0.
_ROPE_NUMBERS = {
    "rope_theta": False, "factor": False, "partial_rotary_factor": False, "low_freq_factor": False,
    "high_freq_factor": False, "original_max_position_embeddings": False, "beta_fast": False, "beta_slow": False,
    "attention_factor": False, "mscale": True, "mscale_all_dim": True,
}  # fmt: skip
_ROPE_NEEDS = {
    "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}  # fmt: skip


# What links call of `transformers`: any version that has it is tried, and `pic doctor` compares what comes out.
NEEDS: Needs = {
    "transformers:AutoModelForCausalLM.from_pretrained": (),
    "transformers:DynamicCache.update": ("key_states", "value_states", "layer_idx"),
    "transformers:LogitsProcessorList": (),
    "transformers:SequenceBiasLogitsProcessor": ("sequence_bias",),
    "transformers:TemperatureLogitsWarper": ("temperature",),
    "transformers:TopPLogitsWarper": ("top_p",),
    "transformers.cache_utils:LinearAttentionLayer.update_conv_state": (),
    "transformers.modeling_gguf_pytorch_utils:load_gguf_checkpoint": ("gguf_checkpoint_path", "return_tensors"),
    "transformers.modeling_gguf_pytorch_utils:tqdm": (),
    "transformers.modeling_outputs:MoeModelOutputWithPast": ("last_hidden_state",),
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS.register": ("key", "value"),
    "transformers.modeling_utils:PreTrainedModel.set_attn_implementation": ("attn_implementation",),
    "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward": (
        "hidden_states", "attention_mask", "position_ids", "position_embeddings", "kwargs",
    ),
    "transformers.utils.chat_parsing:ResponseParser": (),
    "transformers.utils.chat_parsing.response_templates:load_response_template": (),
    "transformers.utils.chat_template_utils:render_jinja_template": ("chat_template", "add_generation_prompt"),
    "transformers.utils.logging:set_tqdm_hook": (),
}  # fmt: skip


@cache
def require_transformers() -> None:
    """Refuse a `transformers` that lacks what links call.

    Raises:
        ModelError: says what it lacks, and what to do.
    """
    if lacks := missing(NEEDS):
        raise ModelError(
            f"transformers {installed('transformers')} lacks {', '.join(lacks)}, which links call; "
            "pip install a version that docs/reference/models.md lists"
        )


def rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters of a model: one set, or one per layer type (Gemma 3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters] if "rope_type" in parameters else list(parameters.values())
    known = ARCHITECTURES.get(config.model_type)  # None: a GGUF file's
    if known is not None and known.states is not None:
        return [one for one in sets if _is_rotated(config, one)]
    return sets


def _is_rotated(config: PretrainedConfig, parameters: dict[str, Any]) -> bool:
    """Whether a hybrid rotates the keys of its attention: many leave the order to their linear layers."""
    is_rope = getattr(config, "position_embedding_type", "rope") == "rope"
    return ARCHITECTURES[config.model_type].rotary is not None and is_rope and parameters.get("rope_theta") is not None


def require_supported(config: PretrainedConfig, name: str) -> None:
    """Refuse a model that the exactness rules (docs/design.md §2) are not tested on.

    Raises:
        ModelError: unsupported architecture, RoPE type or attention variant.
    """
    config = text_config(config)
    if config.model_type not in ARCHITECTURES:
        raise _unsupported(config.model_type, name)
    for parameters in rope_parameters(config):
        if parameters["rope_type"] not in ROPE_TYPES:
            raise ModelError(
                f"{name}: RoPE type {shown(parameters['rope_type'])} is not supported; use a model with one of "
                f"{', '.join(ROPE_TYPES)}"
            )
    if ARCHITECTURES[config.model_type].states is not None:
        _require_linkable_states(config, name)
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(f"{name}: bidirectional attention is not supported; use a causal decoder")


def _require_linkable_states(config: PretrainedConfig, name: str) -> None:
    """Refuse a hybrid without attention, and what makes its steps of one token differ from those of several."""
    low, high = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    if low > 0 or high < math.inf:
        raise ModelError(f"{name}: a time_step_limit of {(low, high)} is not supported; steps of one token ignore it")
    if depends_on_length(config):
        raise ModelError(f"{name}: a hybrid whose RoPE depends on the prompt's length is not supported")
    if not any(map(has_attention, layer_kinds(config))) or not any(map(is_linear, layer_kinds(config))):
        raise ModelError(f"{name}: {config.model_type} without both attention and linear layers is not supported")


def require_known(model_type: object, name: str) -> None:
    """Refuse the `model_type` of a config.json that is none of a supported architecture, before more is read of it.

    Raises:
        ModelError: says why, if that is known.
    """
    if model_type is None:
        raise ModelError(f"{name}: its config.json has no model_type; copy the model again")
    if model_type not in (*ARCHITECTURES, *WRAPPERS):
        raise _unsupported(model_type, name)


def _unsupported(model_type: object, name: str) -> ModelError:
    reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
    why = f": {reason}" if reason else ""
    supported = ", ".join((*ARCHITECTURES, *WRAPPERS))
    return ModelError(f"{name}: architecture {shown(model_type)} is not supported{why}; use a model of {supported}")


def require_in_vllm(config: PretrainedConfig, name: str) -> None:
    """Refuse an architecture with which the connector for vLLM is not tested.

    Raises:
        ModelError: names it, and what to do.
    """
    if config.model_type not in IN_VLLM:
        raise ModelError(
            f"{name}: architecture {shown(config.model_type)} is not supported inside vLLM (there: "
            f"{', '.join(IN_VLLM)}); use --engine torch"
        )


def require_sound(config: PretrainedConfig, name: str) -> None:
    """Refuse a configuration whose values no model can have: `transformers` builds many of them, and fails later.

    Raises:
        ModelError: names the field, its value, and what it must be.
    """
    for problem in _problems(text_config(config)):
        raise ModelError(f"{name}: config.json: {problem}; copy the model again")


def _problems(config: PretrainedConfig) -> Iterator[str]:
    """What is wrong with a configuration, one problem after the other; later ones rely on earlier ones."""
    for field in _SIZES:
        if hasattr(config, field) and not _is_size(getattr(config, field, None)):
            yield _must(field, getattr(config, field, None), f"a whole number from 1 to {_MAX_SIZE}")
    if config.num_attention_heads % config.num_key_value_heads:
        yield _must("num_attention_heads", config.num_attention_heads, "a multiple of num_key_value_heads")
    yield from _head_dim_problems(config)
    yield from _layer_problems(config)
    for field, bound in (("rms_norm_eps", 1.0), ("query_pre_attn_scalar", math.inf)):
        if hasattr(config, field) and not _is_number(getattr(config, field), 0.0, bound):
            yield _must(field, getattr(config, field), f"a number above 0 and below {bound:g}")
    for field in ("final_logit_softcapping", "attn_logit_softcapping"):
        value = getattr(config, field, None)
        if value is not None and not _is_number(value, 0.0):
            yield _must(field, value, "a number above 0, or null")
    for field in ("bos_token_id", "pad_token_id"):
        value = getattr(config, field, None)
        if value is not None and not (type(value) is int and 0 <= value < config.vocab_size):
            yield _must(field, value, f"a token id below vocab_size ({config.vocab_size}), or null")
    yield from _rope_problems(config)


def _head_dim_problems(config: PretrainedConfig) -> Iterator[str]:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        if config.hidden_size % config.num_attention_heads:
            yield _must("hidden_size", config.hidden_size, "a multiple of num_attention_heads")
        head_dim = config.hidden_size // config.num_attention_heads
    if not _is_size(head_dim) or head_dim % 2:
        yield _must("head_dim", head_dim, "an even number above 0")


def _layer_problems(config: PretrainedConfig) -> Iterator[str]:
    """Problems of the activation, the window and the types of the layers."""
    from transformers.activations import ACT2FN

    for field in ("hidden_act", "hidden_activation"):
        value = getattr(config, field, None)
        if value is not None and not (isinstance(value, str) and value in ACT2FN):
            yield _must(field, value, "the name of an activation function (silu, gelu, …)")
    window = getattr(config, "sliding_window", None)
    if window is not None and not _is_size(window):
        yield _must("sliding_window", window, "a whole number above 0, or null")
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        if not (
            isinstance(kinds, list)
            and len(kinds) == config.num_hidden_layers
            and set(map(str, kinds)) <= {*_LAYER_TYPES}
        ):
            yield _must("layer_types", kinds, f"a list of num_hidden_layers names ({', '.join(_LAYER_TYPES)})")
        if "sliding_attention" in kinds and window is None:
            yield _must("sliding_window", window, "a number: layer_types has sliding_attention")


def _rope_problems(config: PretrainedConfig) -> Iterator[str]:
    architecture = ARCHITECTURES[config.model_type]
    for parameters in rope_parameters(config):
        kind = parameters["rope_type"]
        for field in architecture.rope_needs:
            if not _is_number(parameters.get(field), 0.0):
                yield _must(field, parameters.get(field), "a number above 0: attention scales queries by it")
        for field in ("rope_theta", *_ROPE_NEEDS.get(kind, ())):
            if parameters.get(field) is None:
                yield f"RoPE type {kind} needs {field}, which is missing"
        for field, may_be_zero in _ROPE_NUMBERS.items():
            value = parameters.get(field)
            if value is not None and not _is_number(value, -1e-300 if may_be_zero else 0.0):
                yield _must(field, value, "a finite number above 0")
        if (parameters.get("partial_rotary_factor") or 1.0) > 1:
            yield _must("partial_rotary_factor", parameters["partial_rotary_factor"], "at most 1")
        width = getattr(config, "qk_rope_head_dim", None)
        if architecture.rotary and width is not None and width != _rotated_width(config, parameters):
            yield _must("head_dim", config.head_dim, f"such that its rotated part has qk_rope_head_dim ({width})")
        for field in ("short_factor", "long_factor"):
            value = parameters.get(field)
            if value is not None and not (isinstance(value, list) and value and all(_is_number(x, 0.0) for x in value)):
                yield _must(field, value, "a list of numbers above 0")


def _rotated_width(config: PretrainedConfig, parameters: dict[str, Any]) -> int:
    return int(config.head_dim * (parameters.get("partial_rotary_factor") or 1.0))


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_SIZE


def _is_number(value: Any, above: float, below: float = 1e30) -> bool:
    """Whether a value is a number in (above, below); whole ones of any length are compared exactly."""
    return type(value) in (int, float) and above < value < below


def _must(field: str, value: Any, be: str) -> str:
    return f"{field} is {shown(value)}, but must be {be}"


def max_positions(config: PretrainedConfig) -> int:
    """How many positions the model takes; linear and dynamic scaling stretch the configured number."""
    stretch = max(
        (
            float(parameters.get("factor") or 1.0) if parameters["rope_type"] in ("linear", "dynamic") else 1.0
            for parameters in rope_parameters(config)
        ),
        default=1.0,
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
