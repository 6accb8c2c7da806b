"""The files of a model directory: which ones `transformers` reads, and whether they fit each other.

They may come from anybody. So they are read within bounds, and nothing is allocated for what config.json describes
before the weights were seen to have it.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.errors import ModelError
from pictool.reading import open_regular, parse_json, read_file, require_size, shown
from pictool.runtime.architectures import auto_class, text_config

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


# What `transformers` looks for in a directory, in this order.
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_JSON = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_READ_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_MAX_FILE_BYTES = 256 << 20  # of what is no weights: the largest tokenizers have some 40 MB
_MAX_HEADER_BYTES = 32 << 20  # of a weight file: 100,000 tensors have 15 MB
_MAX_LAYERS = 1000
_MOST_IN_BYTE = 8  # weights of a GGUF file: no quantization has less than a bit for one
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})\.")  # in the files of some families by another name
COPY = "copy the model again"

Shape = tuple[int, ...]


def require_files(directory: Path) -> None:
    """Refuse a directory in which a file that is read is none, too large to be what it is called, or no JSON.

    Raises:
        ModelError: names the file.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in _READ_SUFFIXES or path.suffix in _WEIGHT_SUFFIXES:
            try:
                os.close(open_regular(path))
                if path.suffix in _READ_SUFFIXES:
                    require_size(path, _MAX_FILE_BYTES)
            except OSError as error:
                raise ModelError(f"{path}: cannot be read ({error.strerror}); {COPY}") from error

    contents = {name: read_json(directory / name) for name in _JSON if (directory / name).exists()}
    _require_merges(directory / "tokenizer.json", contents.get("tokenizer.json", {}))


def _require_merges(path: Path, tokenizer: dict[str, Any]) -> None:
    """Refuse merges without the prefix that `tokenizers` cuts off them unseen: that can end the whole process.

    Raises:
        ModelError: names the file.
    """
    model = tokenizer.get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        second = (
            merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] if isinstance(merge, list) and merge else ""
        )
        if not (isinstance(second, str) and second.startswith(str(prefix))):
            raise ModelError(f"{path}: has merges without its continuing_subword_prefix; {COPY}")


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file of a model.

    Raises:
        ModelError: it cannot be read, is no JSON, or no object.
    """
    try:
        content = parse_json(read_file(path, _MAX_FILE_BYTES), has_unique_keys=False)  # as `transformers` reads it
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); {COPY}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({str(error)[:80]}); {COPY}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is not a JSON object; {COPY}")
    return content


def source_of(directory: Path) -> dict[str, Any]:
    """What `from_pretrained` reads a model from: a directory, or the GGUF file that has all of it."""
    if directory.is_file():
        return {"pretrained_model_name_or_path": directory.parent, "gguf_file": str(directory)}
    return {"pretrained_model_name_or_path": directory}


def weight_files(directory: Path) -> list[Path]:
    """The files that `transformers` loads a model's weights from, and no other: a backup beside them is none.

    Those are the file that config.json names as `transformers_weights`, or the first of `_WEIGHTS` that is there; of an
    index the files that it lists.

    Raises:
        ModelError: a damaged index or config.json, a file outside the directory or missing, or an adapter.
    """
    if directory.is_file():
        return [directory]
    if (directory / "adapter_config.json").exists():
        raise ModelError(f"{directory}: contains an adapter, which changes the model; merge it into the weights first")
    explicit = read_json(directory / "config.json").get("transformers_weights")
    names = _WEIGHTS if explicit is None else (str(explicit),)
    name = next((name for name in names if (directory / name).is_file()), None)
    if name is None:
        raise ModelError(f"{directory}: contains no weights (*.safetensors or *.bin, named {', '.join(names)}); {COPY}")
    if not name.endswith(".index.json"):
        return [_within(directory, name)]
    listed = read_json(directory / name).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{directory / name}: lists no weights; {COPY}")
    return [_within(directory, str(shard)) for shard in sorted(set(map(str, listed.values())))]


def _within(directory: Path, name: str) -> Path:
    path = directory / name
    if Path(name).name != name or not path.is_file():
        raise ModelError(f"{directory}: its index names {shown(name)}, which is not a weights file beside it; {COPY}")
    return path


def read_header(path: Path) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Where the tensors of a safetensors file begin, its header without `__metadata__`, and these.

    Every entry has a known dtype, a shape, and offsets that fit both and the file: safetensors checks that.

    Raises:
        ModelError: truncated, damaged, or no safetensors file.
    """
    from safetensors import safe_open

    try:
        with path.open("rb") as file:
            start, size = file.read(8), path.stat().st_size
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise ModelError(f"{path}: not a safetensors file, or truncated; {COPY}")
            if length > _MAX_HEADER_BYTES:
                raise ModelError(f"{path}: its header has {length >> 20} MiB, more than any model needs; {COPY}")
            with safe_open(path, "numpy"):
                header: dict[str, Any] = json.loads(file.read(length))
    except ModelError:
        raise
    except Exception as error:  # OSError, SafetensorError, and what a parser meets
        raise ModelError(f"{path}: its header is damaged, or it is truncated ({reason(error)}); {COPY}") from error
    metadata = header.pop("__metadata__", None) or {}
    return 8 + length, header, metadata


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """The shape of every tensor of a weight file; none is loaded.

    Raises:
        ModelError: a damaged file.
    """
    if path.suffix == ".safetensors":
        return {name: tuple(entry["shape"]) for name, entry in read_header(path)[1].items()}
    import torch

    try:
        state = torch.load(path, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    except Exception as error:  # whatever a zip file, a pickle or torch meets
        raise ModelError(f"{path}: is damaged ({reason(error)}); {COPY}") from error


def require_weights(directory: Path, config: PretrainedConfig, name: str) -> int:
    """Refuse a configuration that describes more than the weights hold, before it is built.

    Args:
        name: what the user called the model.

    Returns:
        How many numbers the model will hold.

    Raises:
        ModelError: names the missing layer, or both numbers of weights.
    """
    shapes, num_layers = dict[str, Shape](), text_config(config).num_hidden_layers
    if directory.is_file():
        return _require_room(directory, config, num_layers, name)
    for path in weight_files(directory):
        shapes |= tensor_shapes(path)
    there = {int(match[1]) for tensor in shapes if (match := _LAYER.search(tensor))}
    described = range(min(num_layers, _MAX_LAYERS))
    missing = next((layer for layer in described if layer not in there), None)
    if missing is not None or num_layers > _MAX_LAYERS:
        raise ModelError(
            f"{name}: config.json describes {num_layers} layers, but the weights of "
            f"model.layers.{_MAX_LAYERS if missing is None else missing} are missing; {COPY}"
        )
    expected, held = num_weights(config), sum(map(math.prod, shapes.values()))
    is_packed = method_of(config) is not None  # several weights in one number
    if expected > held and not is_packed:
        raise ModelError(
            f"{name}: the weights have {held} numbers, but config.json describes {expected}: some are missing or have "
            f"a different shape; {COPY}"
        )
    return expected


def _require_room(path: Path, config: PretrainedConfig, num_layers: int, name: str) -> int:
    """Refuse a GGUF file that describes more weights than can be in its bytes. Returns how many. Raises ModelError."""
    if num_layers > _MAX_LAYERS or num_weights(config) > path.stat().st_size * _MOST_IN_BYTE:
        raise ModelError(f"{name}: describes more weights than the file holds; {COPY}")
    return num_weights(config)


def reason(error: BaseException) -> str:
    """What an error of a library says, in one short line."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}…"


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
        raise ModelError(f"{len(wrong)} weights cannot be dequantized, such as {wrong[0]}; use the model in bfloat16")
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
