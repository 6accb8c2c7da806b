"""What the worker's side drives of vLLM: model, attention layers, blocks, and the backends' own metadata."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import select_common_block_size

from pictool.engines.vllm.kv import Heads
from pictool.engines.vllm.rows import Piece
from pictool.errors import ModelError


@dataclass(frozen=True)
class Layer:
    """An attention layer of the model, with its rotary embedding and the decoder layer that it stands in."""

    name: str
    attention: Any
    rotary: nn.Module
    decoder: nn.Module


class Host:
    """A vLLM worker, as far as linking needs it. Metadata come from builders of our own: the runner's are in use."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, heads: Heads) -> None:
        self.config, self.heads = config, heads
        (group,) = kv_cache_config.kv_cache_groups
        self._block_size = group.kv_cache_spec.block_size
        found = config.compilation_config.static_forward_context
        self.model = _find_model([found[name] for name in group.layer_names])
        names = sorted(group.layer_names, key=extract_layer_index)
        self.layers = [_layer(self.model, name, found[name]) for name in names]
        self.device = next(self.model.parameters()).device
        self.limit = config.scheduler_config.max_num_batched_tokens
        self._builders = [self._builder(layer, group.kv_cache_spec) for layer in self.layers]

    def write(self, layer: Layer, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Put rotated keys, and values, [tokens, kv_heads, head_dim], into blocks; the backend knows its layout."""
        one = layer.attention
        one.impl.do_kv_cache_update(one, key.contiguous(), value.contiguous(), one.kv_cache, slots)

    def rotate(self, layer: Layer, key: Tensor, positions: Tensor) -> Tensor:
        """Keys [tokens, kv_heads, head_dim] rotated to their positions by the layer's own rotary embedding."""
        flat = key.reshape(len(key), -1).clone()  # rotated in place by some backends
        rotated: Tensor = layer.rotary(positions, flat, None)[0].view_as(key)
        return rotated

    def slots(self, blocks: Sequence[int], positions: Tensor) -> Tensor:
        """Where a request's positions stand, on the device."""
        table = torch.tensor(blocks, dtype=torch.int64)
        slots = table[positions // self._block_size] * self._block_size + positions % self._block_size
        on_device: Tensor = slots.to(self.device)
        return on_device

    @contextmanager
    def passing(self, piece: Piece, tables: Sequence[Sequence[int]]) -> Iterator[None]:
        """A forward context in which every run [a, b) of a piece is a sequence of length b over its prompt's blocks."""
        common, slots = self._common(piece, tables)
        made: dict[int, Any] = {}
        metadata = {}
        for layer, (builder, ratio) in zip(self.layers, self._builders, strict=True):
            if id(builder) not in made:
                made[id(builder)] = builder.build(0, _in_kernel_blocks(common, ratio), fast_build=True)
            metadata[layer.name] = made[id(builder)]
        mapping = {layer.name: slots for layer in self.layers}
        with set_forward_context(
            metadata, self.config, num_tokens=len(piece.index), slot_mapping=mapping, skip_compiled=True
        ):
            yield

    def _common(self, piece: Piece, tables: Sequence[Sequence[int]]) -> tuple[CommonAttentionMetadata, Tensor]:
        start, end = torch.from_numpy(piece.start), torch.from_numpy(piece.end)
        starts = torch.nn.functional.pad((end - start).cumsum(0), (1, 0)).to(torch.int32)
        longest = int(end.max())
        width = -(-longest // self._block_size)
        rows = [[*tables[owner][:width], *[0] * (width - len(tables[owner]))] for owner in piece.owner.tolist()]
        positions = positions_of(piece)
        table = torch.tensor(rows, dtype=torch.int32)
        owner = torch.repeat_interleave(torch.arange(len(rows)), end - start)
        blocks = table[owner, positions // self._block_size].long()
        slots = (blocks * self._block_size + positions % self._block_size).to(self.device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device), query_start_loc_cpu=starts,
            seq_lens=end.to(torch.int32).to(self.device), seq_lens_cpu_upper_bound=end.to(torch.int32),
            num_reqs=len(rows), num_actual_tokens=len(positions), max_query_len=int((end - start).max()),
            max_seq_len=longest, block_table_tensor=table.to(self.device), slot_mapping=slots, causal=True,
            positions=positions.to(self.device), is_prefilling=torch.ones(len(rows), dtype=torch.bool),
        )  # fmt: skip
        return common, slots

    def _builder(self, layer: Layer, spec: Any) -> tuple[Any, int]:
        """The metadata builder of a layer, shared by layers alike; and kernel blocks per block."""
        backend = layer.attention.get_attn_backend()
        window = getattr(layer.attention.impl, "sliding_window", None)
        key = (backend, layer.attention.num_heads, str(window))
        if not hasattr(self, "_made"):
            self._made: dict[Any, tuple[Any, int]] = {}
        if key not in self._made:
            kernel = select_common_block_size(spec.block_size, [backend], [spec])
            builder = backend.get_builder_cls()(
                spec.copy_with_new_block_size(kernel), [layer.name], self.config, self.device
            )
            self._made[key] = builder, spec.block_size // kernel
        return self._made[key]


def positions_of(piece: Piece) -> Tensor:
    """The position of every row of a piece, int64 [rows]."""
    runs = zip(piece.start.tolist(), piece.end.tolist(), strict=True)
    return torch.cat([torch.arange(start, end) for start, end in runs])


def _in_kernel_blocks(common: CommonAttentionMetadata, ratio: int) -> CommonAttentionMetadata:
    """The metadata with a block table of the kernel's smaller blocks."""
    if ratio == 1:
        return common
    table = common.block_table_tensor
    kernel = table[..., None] * ratio + torch.arange(ratio, dtype=table.dtype, device=table.device)
    return common.replace(block_table_tensor=kernel.flatten(1))


def _find_model(attentions: Sequence[nn.Module]) -> nn.Module:
    """The model that holds these layers. vLLM hands it to no connector; it is the one object that can run them all."""
    wanted = {id(one) for one in attentions}
    for one in gc.get_objects():
        if issubclass(type(one), nn.Module) and hasattr(type(one), "compute_logits"):
            modules = {id(module) for module in one.modules()}
            if wanted <= modules:
                return one  # type: ignore[no-any-return]
    raise ModelError("pic: this vLLM keeps its model where the connector cannot find it; use vllm==0.32.*")


def _layer(model: nn.Module, name: str, attention: Attention) -> Layer:
    parts = {id(module): path for path, module in model.named_modules()}
    path = parts[id(attention)]
    around = path.rpartition(".")[0]
    rotary = getattr(model.get_submodule(around), "rotary_emb", None)
    if not isinstance(rotary, nn.Module):
        raise ModelError(f"pic: {name} has no rotary embedding of its own; this architecture cannot be linked")
    return Layer(name, attention, rotary, model.get_submodule(around.rpartition(".")[0]))
