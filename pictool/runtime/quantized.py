"""Checkpoints of quantized weights: which are loaded, and which are refused before memory is taken.

Weights are dequantized to the dtype of computation when they are loaded, by `transformers`, and the model is then an
ordinary one: its KV is in that dtype, and activations are not quantized. The fingerprint is that of the quantized
weights and their configuration.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pictool.errors import ModelError
from pictool.reading import shown
from pictool.runtime.architectures import auto_class

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# By method: the package that is needed to dequantize it.
_PACKAGES = {"compressed-tensors": "compressed_tensors", "fp8": "accelerate", "mxfp4": None, "torchao": "torchao"}
# The kinds of torchao that it dequantizes on every device; its packed int4 needs kernels of an accelerator.
_OF_TORCHAO = (
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
)  # fmt: skip


def method_of(config: PretrainedConfig) -> str | None:
    """How the weights are quantized, as config.json says it; None if they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = _fields(settings).get("quant_method")
    return str(getattr(method, "value", method))


def require_loadable(config: PretrainedConfig, name: str) -> None:
    """Refuse quantized weights that cannot be dequantized here.

    Raises:
        ModelError: names the method, and the remedy.
    """
    method = method_of(config)
    if method is None:
        return
    if method not in _PACKAGES:
        raise ModelError(
            f"{name}: weights quantized by {shown(method)} are not supported (supported: {', '.join(_PACKAGES)}); use "
            "the model in bfloat16, or one that llm-compressor quantized"
        )
    if method == "torchao" and (kind := _torchao_kind(config)) not in _OF_TORCHAO:
        raise ModelError(
            f"{name}: weights quantized by torchao's {shown(kind)} are not supported (supported: "
            f"{', '.join(_OF_TORCHAO)}); use the model in bfloat16"
        )
    package = _PACKAGES[method]
    if package is not None and find_spec(package) is None:
        extra = "torchao" if method == "torchao" else "quantized"
        raise ModelError(f"{name}: weights quantized by {method} need more packages; pip install 'pictool[{extra}]'")


def _torchao_kind(config: PretrainedConfig) -> object:
    """The class of torchao's configuration, as config.json says it; all of `quant_type` if it says it otherwise."""
    kind: Any = _fields(config.quantization_config).get("quant_type")
    try:
        return kind["default"]["_type"]
    except (KeyError, TypeError):
        return kind


def num_weights(config: PretrainedConfig) -> int:
    """How many weights the configuration describes; nothing is allocated."""
    return sum(parameter.numel() for parameter in empty_module(config).parameters())


def to_dequantize(config: PretrainedConfig) -> PretrainedConfig:
    """A copy that makes `transformers` dequantize the weights while it loads them."""
    changed = copy.deepcopy(config)
    changed.quantization_config = _fields(changed.quantization_config) | {"dequantize": True}
    return changed


def plain_module(loaded: Any, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """An ordinary model over the dequantized weights of `loaded`, without the hooks of its quantizer.

    Raises:
        ModelError: weights that were not dequantized.
    """
    plain, weights = empty_module(config, dtype=dtype), loaded.state_dict()
    needed = plain.state_dict()
    wrong = [name for name in needed if name not in weights or weights[name].shape != needed[name].shape]
    if wrong:
        raise ModelError(f"{len(wrong)} weights cannot be dequantized, as {wrong[0]}; use the model in bfloat16")
    plain.load_state_dict({name: _dequantized(weights[name]).to(dtype) for name in needed}, assign=True)
    buffers = dict(loaded.named_buffers())
    for name, buffer in list(plain.named_buffers()):
        if buffer.is_meta:  # not part of the state, as frequencies of RoPE
            parent, _, last = name.rpartition(".")
            plain.get_submodule(parent).register_buffer(last, buffers[name].clone(), persistent=False)
    plain.tie_weights()
    return plain


def _dequantized(weight: Any) -> torch.Tensor:
    """A weight as an ordinary tensor: torchao's are of classes of its own, in the dtype that it saved them from."""
    import torch

    return weight if type(weight) is torch.Tensor else weight.dequantize()


def _fields(settings: Any) -> dict[str, Any]:
    return dict(settings if isinstance(settings, dict) else settings.to_dict())


def empty_module(config: PretrainedConfig, **options: Any) -> Any:
    """The model of a configuration, without weights and without its quantization."""
    import torch

    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        return auto_class(plain).from_config(plain, **options)
