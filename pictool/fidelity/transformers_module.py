"""A second `transformers` module over the weights of a model: what ours is compared with, at no weight's cost."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from pictool.runtime.architectures import auto_class, decoder_of, keep_language_model, language_model_of

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def transformers_module(model: Model, attention: str | None = None) -> Any:
    """A second module over the parameters of `model`, as `transformers` makes it: no weight is held twice.

    Args:
        attention: the name of one of transformers' own attention functions; None: its choice, as sdpa.
    """
    ours, config = model.module, copy.deepcopy(model.whole_config)
    with torch.device("meta"):
        module = auto_class(config).from_config(config, dtype=model.torch_dtype, attn_implementation=attention)
    keep_language_model(module)
    needed = module.state_dict()
    module.load_state_dict({name: own for name, own in ours.state_dict().items() if name in needed}, assign=True)
    # Not shared: where the rotation depends on the length, it depends on the prompts that came before.
    decoder, rotary = decoder_of(module), type(decoder_of(ours).rotary_emb)
    decoder.rotary_emb = rotary(decoder.config).to(model.device)
    buffers = dict(ours.named_buffers())
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:  # not part of the state
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).register_buffer(last, buffers[name].clone(), persistent=False)
    return language_model_of(module).requires_grad_(False).eval()
