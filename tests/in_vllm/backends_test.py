"""Attention backends to whose KV cache nothing can be written are refused by name when the server starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from pictool.engines.vllm.worker.kv import _attention_layers
from pictool.errors import ModelError


class _Attention(nn.Module):
    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.get_attn_backend = lambda: backend


def layers_of(backend: Any) -> Any:
    """The layers of a model of one decoder layer, with this backend."""
    block = nn.Module()
    block.rotary_emb, block.attn = nn.Identity(), _Attention(backend)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].self_attn = block
    name = "layers.0.self_attn.attn"
    context = SimpleNamespace(static_forward_context={name: block.attn})
    config = SimpleNamespace(compilation_config=context, model_config=SimpleNamespace(use_mla=False))
    return _attention_layers(model, config, [name])  # type: ignore[arg-type]


def test_a_backend_that_writes_within_its_forward_is_refused() -> None:
    from vllm.v1.attention.backends.hpc_attn import HpcAttentionBackend

    with pytest.raises(ModelError, match=r"HPC_ATTN .*--attention-backend FLASH_ATTN"):
        layers_of(HpcAttentionBackend)


def test_a_backend_that_was_not_examined_is_refused() -> None:
    def named(name: str) -> Any:
        return SimpleNamespace(get_name=lambda: name, forward_includes_kv_cache_update=False)

    with pytest.raises(ModelError, match=r"B12X .*FLASH_ATTN .*TRITON_ATTN"):
        layers_of(named("B12X"))
    assert layers_of(named("FLASHINFER"))


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN"])
def test_backends_that_write_through_a_call_of_their_own_are_taken(name: str) -> None:
    """FlashInfer is another one; its package is for GPUs alone, and so cannot be imported here."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert [layer.backend for layer in layers_of(AttentionBackendEnum[name].get_class())] == [name]
