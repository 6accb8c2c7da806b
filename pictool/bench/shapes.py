"""Random models with the shapes of known ones: measuring speed needs no weights. Made on the device, in the dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from pictool.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Shape:
    """Fields of a `transformers` configuration, and the shape that reads prompts for it under speccache."""

    name: str
    config: Mapping[str, Any]
    speculative: str

    def make_config(self, **changed: Any) -> PretrainedConfig:
        """The configuration, with some fields changed."""
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.for_model(**{**self.config, **changed})
        return config


@cache
def shapes() -> Mapping[str, Shape]:
    """Every shape by its name."""
    entries = yaml.safe_load((files("pictool.bench") / "shapes.yaml").read_text(encoding="utf-8"))
    return {name: Shape(name, entry["config"], entry["speculative"]) for name, entry in entries.items()}


def shape_of(name: str) -> Shape:
    """The shape of this name.

    Raises:
        InputError: there is none; lists those that are.
    """
    if name not in shapes():
        raise InputError(f"--shape {name}: must be one of {', '.join(shapes())}")
    return shapes()[name]


def random_model(name: str, device: str = "auto", dtype: str = "auto", seed: int = 0, salt: str = "") -> Model:
    """A random model of a shape, with the tokenizer of the embedded model: every shape has its few token ids.

    Args:
        device, salt: as of `load_model`. dtype: likewise; ``auto`` is bfloat16 on an accelerator.

    Raises:
        InputError: no such shape, device or dtype.
    """
    from pictool.runtime.model import load_model, wrap_model

    shape = shape_of(name)
    embedded = load_model("embedded", device, dtype)
    on_auto = "float32" if embedded.device == "cpu" else "bfloat16"
    dtype = on_auto if dtype == "auto" else embedded.dtype
    module = random_module(shape.make_config(), embedded.device, dtype, seed)
    return wrap_model(module, embedded.tokenizer, f"random {name}", salt)


def random_module(config: PretrainedConfig, device: str, dtype: str, seed: int) -> Any:
    """A model with weights as `transformers` draws them, on the device from the start.

    The state of torch's random numbers is the same afterwards.
    """
    import torch

    from pictool.runtime.architectures import auto_class
    from pictool.runtime.device import is_accelerator

    kind = torch.device(device)
    forked = [kind] if is_accelerator(device) else []
    with torch.random.fork_rng(forked, device_type=kind.type if forked else "cuda"), kind:
        torch.manual_seed(seed)
        return auto_class(config).from_config(config, dtype=getattr(torch, dtype)).eval()


def save_speculative(name: str, directory: str, seed: int = 1) -> str:
    """Save a random model of the speculative shape of `name`, with its tokenizer: a `spec_model` of speccache.

    It takes as many positions as its target.

    Returns:
        the directory.
    """
    from pictool.runtime.model import load_model

    target = shape_of(name)
    small = shape_of(target.speculative)
    positions = max(shape.config["max_position_embeddings"] for shape in (target, small))
    config = small.make_config(max_position_embeddings=positions)
    random_module(config, "cpu", "bfloat16", seed).save_pretrained(directory)
    load_model("embedded").tokenizer.save_pretrained(directory)
    return directory
