"""KV in vLLM's blocks: objects are read, cut to a rank's heads, rotated by vLLM's own model, and written to slots."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pictool.core import Geometry, Target
from pictool.engines.vllm.messages import Adapter, LinkJob
from pictool.engines.vllm.needs import INSTALL
from pictool.engines.vllm.request import Problem, UnusableObjectError
from pictool.engines.vllm.scheduler.matching import open_object
from pictool.errors import ModelError, PicError
from pictool.linker.plan import Span
from pictool.runtime.memory import streams
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.worker_base import WorkerBase

# Their metadata have room for any number of runs, or for max_num_seqs (`RowForward.max_rows`)
BACKENDS = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"})
LATENT_BACKENDS = frozenset({"AMX_MLA"})
Bits = NDArray[Any]  # numbers of 2 or 4 bytes, as unsigned integers
_scratch = threading.local()  # a layer of an object, by thread
KV = tuple[Tensor, Tensor]  # un-rotated keys and values, [tokens, kv_heads, head_dim]; of latents: the key, the latent


@dataclass(frozen=True)
class KVHeads:
    """The KV heads of a rank: [first, last) of the model's; `copies` ranks hold the same ones."""

    first: int
    last: int
    copies: int

    def __len__(self) -> int:
        return self.last - self.first

    @classmethod
    def of_rank(cls, total: int, rank: int, size: int) -> KVHeads:
        """As vLLM distributes them: a part to each rank, or one head to several ranks."""
        if total >= size:
            return cls(rank * total // size, (rank + 1) * total // size, 1)
        copies = size // total
        return cls(rank // copies, rank // copies + 1, copies)


class TensorParallelRank:
    """This worker among the ranks of tensor parallelism: its KV heads, and what it exchanges with the others."""

    def __init__(self, num_kv_heads: int) -> None:
        from vllm.distributed import get_tp_group

        self._group = get_tp_group()
        self.heads = KVHeads.of_rank(num_kv_heads, self._group.rank_in_group, self._group.world_size)

    @property
    def is_first(self) -> bool:
        return bool(self._group.rank_in_group == 0)

    def agree(self, problems: Sequence[Problem | None], is_done: Sequence[bool]) -> list[tuple[Problem | None, bool]]:
        """Of jobs in the same order on every rank: what failed on one has failed, what all have done is done."""
        own = list(zip(problems, is_done, strict=True))
        if self._group.world_size == 1 or not own:
            return own
        of_ranks: list[list[tuple[Problem | None, bool]]] = [[] for _ in range(self._group.world_size)]
        torch.distributed.all_gather_object(of_ranks, own, group=self._group.cpu_group)
        return [
            (next((problem for problem, _ in job if problem is not None), None), all(done for _, done in job))
            for job in zip(*of_ranks, strict=True)
        ]

    def follow_first(self, number: int, has_failed: bool) -> tuple[int, bool]:
        """The first rank's number, and whether any rank has failed."""
        if self._group.world_size == 1:
            return number, has_failed
        own = torch.tensor([number, has_failed])
        of_ranks = [torch.empty_like(own) for _ in range(self._group.world_size)]
        torch.distributed.all_gather(of_ranks, own, group=self._group.cpu_group)
        return int(of_ranks[0][0]), any(bool(of_rank[1]) for of_rank in of_ranks)

    def sum_over_heads(self, partial: Tensor) -> Tensor:
        """A sum over this rank's KV heads becomes one over all of them, each counted once."""
        if self._group.world_size == 1:
            return partial
        total: Tensor = self._group.all_reduce(partial.contiguous())
        return total / self.heads.copies

    def gather_heads(self, part: Tensor) -> Tensor:
        """[tokens, kv_heads, head_dim] of all ranks, every head once."""
        if self._group.world_size == 1:
            return part
        joined: Tensor = self._group.all_gather(part.contiguous(), dim=1)
        by_rank = joined.view(len(joined), self._group.world_size, len(self.heads), -1)
        return by_rank[:, :: self.heads.copies].flatten(1, 2)


def find_worker() -> WorkerBase:
    """The vLLM worker that is calling. vLLM gives connectors neither it nor its model: it is on the call stack.

    Raises:
        ModelError: no worker is calling.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, WorkerBase):
            return caller
        frame = frame.f_back
    raise ModelError(f"PicConnector: no vLLM worker is on the call stack, so its model is not found; {INSTALL}")


def withhold_generators(worker: WorkerBase) -> None:
    """Take the generators of seeded requests out of a step that discards what it samples for them.

    vLLM rewinds a generator after such a step, that of a prompt's part, which raises on a CPU and ends the engine. It
    is to be called in every step before it samples.
    """
    runner: Any = worker.model_runner
    generators, discards = runner.input_batch.generators, runner.discard_request_mask.np
    for name, index in runner.input_batch.req_id_to_index.items():
        generator = runner.requests[name].generator
        if generator is not None and not discards[index]:
            generators[index] = generator
        else:
            generators.pop(index, None)


@dataclass(frozen=True)
class AttentionLayer:
    """An attention layer of the model, with its rotary embedding and the decoder layer that it is in."""

    name: str
    attention: Any
    rotary: nn.Module
    decoder: nn.Module

    @property
    def backend(self) -> str:
        """The name of its attention backend."""
        return str(self.attention.get_attn_backend().get_name())

    @property
    def has_latents(self) -> bool:
        """Whether it keeps a latent and a rotated key of all heads (MLA)."""
        return self.backend in LATENT_BACKENDS

    def keys_and_values(self, inputs: Sequence[Tensor]) -> KV:
        """The rotated keys and the values, or the latents, in what its attention is called with."""
        return (inputs[2], inputs[1]) if self.has_latents else (inputs[1], inputs[2])

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """In which order the decoder layer takes positions, hidden_states and, unless it adds that itself, residual."""
        names = inspect.signature(self.decoder.forward).parameters
        return tuple(name for name in names if name in ("positions", "hidden_states", "residual"))


class WorkerModel:
    """vLLM's model on this worker: its attention layers, and their KV in blocks.

    Attributes:
        module: the model.
        layers: its attention layers, from the first to the last.
        config: vLLM's configuration.
        cache_spec: vLLM's description of the KV cache.
        num_blocks: of it.
        device: where the model is.
        rank: this worker among those of tensor parallelism.

    Args:
        runner: vLLM's model runner, which may have a manager of LoRA adapters.
    """

    def __init__(
        self, module: nn.Module, config: VllmConfig, kv_cache_config: KVCacheConfig, rank: TensorParallelRank,
        runner: Any = None,
    ) -> None:  # fmt: skip
        self.module, self.config, self.rank, self._runner = module, config, rank, runner
        self._lora = getattr(runner, "lora_manager", None)
        (group,) = kv_cache_config.kv_cache_groups
        self.cache_spec: Any = group.kv_cache_spec
        self.num_blocks = int(kv_cache_config.num_blocks)
        self.layers = _attention_layers(module, config, group.layer_names)
        self.device = next(module.parameters()).device
        model = config.model_config
        self._stores_halves = bool(model.use_mla and getattr(model.hf_config, "rope_interleave", False))

    @contextmanager
    def under(self, adapter: Adapter | None, num_tokens: int) -> Iterator[None]:
        """Compute rows under an adapter, or by the base model alone: vLLM's own step has adapters of its own."""
        if self._lora is None:
            yield
            return
        from vllm.lora.layers import LoRAMapping

        manager = self._lora._adapter_manager
        before, number = manager._last_mapping, 0 if adapter is None else adapter.request.lora_int_id
        mapping = LoRAMapping((number,) * num_tokens, (number,), is_prefill=True)
        if adapter is None:  # the step's adapters stay where they are
            manager.set_adapter_mapping(mapping)
        else:  # it may take the place of one of them
            self._lora.set_active_adapters({adapter.request}, mapping)
        try:
            yield
        finally:
            if before is not None and adapter is None:
                manager.set_adapter_mapping(before)
            elif before is not None:
                of_step = set(self._runner.input_batch.lora_id_to_lora_request.values())
                if {0, *(request.lora_int_id for request in of_step)}.issuperset(before.index_mapping):
                    self._lora.set_active_adapters(of_step, before)

    def rotate(self, layer: AttentionLayer, key: Tensor, positions: Tensor) -> Tensor:
        """Rotate keys [tokens, kv_heads, head_dim] to their positions, by the layer's own rotary embedding."""
        if not len(key):  # compiled kernels take no fewer than one row
            return key
        if self._stores_halves:  # vLLM rotates pairs of neighbours
            key = torch.stack(key.chunk(2, -1), -1).flatten(-2)
        own = key.clone() if layer.has_latents else key.flatten(1).clone()  # some backends rotate in place
        other = own.clone() if layer.has_latents else None  # DeepSeek's rotary embedding takes no key alone
        rotated: Tensor = layer.rotary(positions, own, other)[0].view_as(key)
        return rotated

    def as_stored(self, key: Tensor) -> Tensor:
        """Un-rotated keys as objects have them: `transformers` puts the first of all pairs before the others."""
        return torch.cat((key[..., 0::2], key[..., 1::2]), -1) if self._stores_halves else key

    def write(self, layer: AttentionLayer, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write rotated keys, and values, [tokens, kv_heads, head_dim], into slots; the backend knows its layout."""
        attention, key, value = layer.attention, key.contiguous(), value.contiguous()
        if layer.has_latents:
            scale = attention.kv_cache_dtype, attention._k_scale
            attention.impl.do_kv_cache_update(value.squeeze(1), key, attention.kv_cache, slots, *scale)
        else:
            attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, slots)

    def slots(self, blocks: Sequence[int], positions: Tensor) -> Tensor:
        """The slots of a prompt's positions in the KV cache, int64 on the device."""
        table, block_size = torch.tensor(blocks, dtype=torch.int64), self.cache_spec.block_size
        slots: Tensor = (table[positions // block_size] * block_size + positions % block_size).to(self.device)
        return slots


def _attention_layers(module: nn.Module, config: VllmConfig, names: Sequence[str]) -> list[AttentionLayer]:
    """The layers of these names, in the order of the model.

    Raises:
        ModelError: a layer that is not the model's, or that has no rotary embedding; a backend to whose KV cache
            nothing can be written.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    paths = {id(part): path for path, part in module.named_modules()}
    layers = []
    for name in sorted(names, key=extract_layer_index):
        attention = config.compilation_config.static_forward_context[name]
        path = paths.get(id(attention), "")
        block, decoder = path.rpartition(".")[0], re.sub(r"(\.\d+)\..*", r"\1", path)
        rotary = getattr(module.get_submodule(block), "rotary_emb", None)
        if not isinstance(rotary, nn.Module):
            raise ModelError(f"pic: {name} has no rotary embedding; this architecture cannot be linked")
        layer = AttentionLayer(name, attention, rotary, module.get_submodule(decoder))
        if config.model_config.use_mla and not layer.has_latents:
            raise ModelError(
                f"pic: the attention backend {layer.backend} of latents (MLA) is not supported: CPU_MLA cannot "
                "compute partly cached prompts, and others are untested; use a CPU with AMX, and --dtype bfloat16"
            )
        if attention.get_attn_backend().forward_includes_kv_cache_update and not layer.has_latents:
            raise ModelError(
                f"pic: the attention backend {layer.backend} writes KV only within its forward, so objects cannot be "
                "loaded into its blocks; use --attention-backend FLASH_ATTN"
            )
        if layer.backend not in BACKENDS | LATENT_BACKENDS:
            raise ModelError(
                f"pic: the attention backend {layer.backend} is untested for forwards of many short runs; "
                f"use --attention-backend FLASH_ATTN (or one of {', '.join(sorted(BACKENDS - {'FLASH_ATTN'}))})"
            )
        layers.append(layer)
    return layers


@dataclass(frozen=True)
class LoadedJob:
    """A job whose objects are in its blocks, at `positions`.

    `cached` is their un-rotated KV by layer, of the layers at which the policy compares it with fresh KV.
    """

    job: LinkJob
    positions: NDArray[np.int64]
    cached: dict[int, KV]


class ObjectReader:
    """Reads the KV of a job's objects, any layer by any thread. A context manager.

    Attributes:
        positions: int64 [tokens], the positions of the prompt that are read.

    Args:
        device: what reads from here is copied to. pause: called before an object is opened.

    Raises:
        UnusableObjectError: an object that is missing, foreign or damaged.
    """

    def __init__(
        self, store: Store, target: Target, job: LinkJob, heads: KVHeads, device: torch.device = torch.device("cpu"),
        pause: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._target, self._heads, self._memory, self._device = target, heads, store.memory, device
        self._parts: list[tuple[ObjectFile, slice]] = []  # objects, and which of their tokens are read
        positions = [np.zeros(0, dtype=np.int64)]
        try:
            for span in job.plan.object_spans:
                start = max(span.start, job.computed)
                if start < span.end:
                    pause()
                    part = slice(span.part.start + start - span.start, span.part.stop)
                    self._parts.append((self._open(store, span, job), part))
                    positions.append(np.arange(start, span.end))
        except BaseException:
            self.close()
            raise
        self.positions = np.concatenate(positions)

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file, _ in self._parts:
            file.close()

    def read(self, layer: int) -> KV:
        """Keys and values of a layer at `positions`; its checksum was checked. In memory of their own (`host_buffer`).

        Raises:
            UnusableObjectError: a damaged layer.
        """
        dtype, parts = getattr(torch, self._target.dtype), []
        for part in self._target.geometry.parts:
            shape = (len(self.positions), len(self._heads), part.width)
            num_bytes = prod(shape) * dtype.itemsize
            parts.append(streams.host_buffer(num_bytes, self._device).view(dtype).view(shape))
        start = 0
        for file, tokens in self._parts:
            end = start + tokens.stop - tokens.start
            for into, data in zip(parts, self._of_heads(file, layer), strict=True):
                # By numpy: torch would use as many threads as the engine has
                _bits(into)[start:end] = data[:, tokens].transpose(1, 0, 2)
            start = end
        return by_rotation(self._target.geometry, *parts)

    def _open(self, store: Store, span: Span, job: LinkJob) -> ObjectFile:
        assert span.key is not None
        file = open_object(store, self._target, span.key, job.plan.salt)
        file.touch()  # in the store of this machine; the planner has counted the hit
        return file

    def _of_heads(self, file: ObjectFile, layer: int) -> tuple[Bits, Bits]:
        """The parts of an object (keys and values), of this rank's heads, [heads, tokens, width]; not to be written to.

        They are valid until the next call on this thread, unless they are kept in memory.
        """
        if self._memory is None:
            return self._read(file, layer)
        heads = slice(self._heads.first, self._heads.last)
        content = (file.checksums["layers"][layer], file.meta.codec, file.meta.shape, heads.start, heads.stop)
        num_bytes = file.layer_bytes * len(self._heads) // self._target.geometry.parts[0].heads
        kept: tuple[Bits, Bits] = self._memory.get(
            content, num_bytes, lambda: tuple(part.copy() for part in self._read(file, layer))
        )
        return kept

    def _read(self, file: ObjectFile, layer: int) -> tuple[Bits, Bits]:
        heads, stored = slice(self._heads.first, self._heads.last), file.meta.shape
        buffer = getattr(_scratch, "buffer", None)
        if buffer is None or len(buffer) < file.layer_bytes:
            buffer = _scratch.buffer = memoryview(bytearray(file.layer_bytes))
        try:
            first, second = file.layer_of_heads(layer, heads, buffer)
        except (PicError, OSError) as error:
            raise UnusableObjectError(file.meta.key, error) from error
        (of_first, of_second), dtype = stored.of_heads(heads).part_dims, f"u{stored.width}"
        return np.frombuffer(first, dtype).reshape(of_first), np.frombuffer(second, dtype).reshape(of_second)


def by_rotation(geometry: Geometry, first: Tensor, second: Tensor) -> KV:
    """The parts of a layer, the one that is rotated before the other; or, from this order, back."""
    return (first, second) if geometry.parts[0].rotated else (second, first)


def _bits(tensor: Tensor) -> Bits:
    """The tensor's numbers as integers: numpy has no bfloat16."""
    bits: Bits = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy()
    return bits.view(f"u{tensor.element_size()}")
