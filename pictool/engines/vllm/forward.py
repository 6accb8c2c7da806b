"""Forwards of chosen rows through vLLM's model: all layers at once, or layer by layer with narrowing between them.

Rows are virtual sequences: every run of consecutive positions [a, b) of a prompt is a sequence of length b whose last
b - a tokens are computed. Each of them attends to all earlier positions of its prompt: their K and V are in the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pictool.core import RowMask, TokenIds
from pictool.engines.vllm.kv import AttentionLayer, LoadedJob, WorkerModel
from pictool.linker.narrowing import Narrowing
from pictool.linker.policies.base import Prompt, Scores
from pictool.runtime.model import Model

Ints = NDArray[np.int64]
Hidden = tuple[Tensor, Tensor | None]  # hidden states and residual, [rows, hidden]
T = TypeVar("T")
# Work that is done in parts: each part yields what it was worth, in rows that go through all layers.
Work = Generator[float, None, T]


@dataclass(frozen=True)
class Batch:
    """The prompts of a forward: their token ids one after another, where each begins, and their blocks."""

    tokens: Ints  # [tokens of all prompts]
    start: Ints  # [prompts]
    blocks: NDArray[np.int32]  # [prompts, most blocks], filled up with 0

    @classmethod
    def of(cls, tokens: Sequence[TokenIds], blocks: Sequence[Sequence[int]]) -> Batch:
        table = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
        for row, numbers in zip(table, blocks, strict=True):
            row[: len(numbers)] = numbers
        lengths = np.cumsum([0, *map(len, tokens)])
        return cls(np.concatenate(tokens).astype(np.int64), lengths[:-1], table)

    @classmethod
    def of_jobs(cls, loaded: Sequence[LoadedJob]) -> Batch:
        return cls.of([entry.job.plan.layout.tokens for entry in loaded], [entry.job.blocks for entry in loaded])


@dataclass(frozen=True)
class MicroBatch:
    """Rows that one forward computes, as runs. `index` says which rows of the set they are, run by run."""

    index: Ints  # [rows]
    owner: Ints  # [runs], the prompt of each
    start: Ints  # [runs], its positions [start, end)
    end: Ints

    def rows(self) -> tuple[Ints, Ints]:
        """The run and the position of every row, [rows] each."""
        lengths = self.end - self.start
        before = np.cumsum(lengths) - lengths  # rows of the runs before each
        run = np.repeat(np.arange(len(lengths)), lengths)
        return run, self.start[run] + np.arange(len(run)) - before[run]


@dataclass(frozen=True)
class RowSet:
    """Rows of the prompts of a batch, by prompt (`owner`), then by position."""

    owner: Ints  # [rows]
    position: Ints  # [rows]

    def __len__(self) -> int:
        return len(self.owner)

    @classmethod
    def of(cls, masks: Sequence[RowMask]) -> RowSet:
        """The rows of prompt i are where masks[i] is true."""
        rows = [np.flatnonzero(mask) for mask in masks]
        owner = np.repeat(np.arange(len(rows)), [len(positions) for positions in rows])
        return cls(owner, np.concatenate([np.zeros(0, dtype=np.int64), *rows]))

    def micro_batches(self, limit: int) -> Iterator[MicroBatch]:
        """The rows in forwards of at most `limit`.

        Within a prompt they go by position, so that whatever a row attends to is in place before its forward, or is
        computed in the same. Within a forward short runs come first, as some backends need.
        """
        for first in range(0, len(self), limit):
            yield self._micro_batch(first, min(first + limit, len(self)))

    def _micro_batch(self, first: int, last: int) -> MicroBatch:
        owner, position = self.owner[first:last], self.position[first:last]
        is_new = np.concatenate([[True], (np.diff(owner) != 0) | (np.diff(position) != 1)])
        begin = np.flatnonzero(is_new)
        length = np.diff(np.append(begin, last - first))
        order = np.argsort(length, kind="stable")
        begin, length = begin[order], length[order]
        index = first + np.repeat(begin - np.cumsum(length) + length, length) + np.arange(length.sum())
        return MicroBatch(index, owner[begin], position[begin], position[begin] + length)


class RowForward:
    """Computes rows of prompts with vLLM's model; their K and V replace those in the blocks.

    Attention metadata come from builders of our own: the model runner's are in use for its own step.
    """

    def __init__(self, model: WorkerModel) -> None:
        self.model = model
        scheduling, backends = model.config.scheduler_config, {layer.backend for layer in model.layers}
        self.max_rows = int(scheduling.max_num_batched_tokens)
        if "FLASHINFER" in backends:  # its metadata have room for so many sequences, and each row may be one
            self.max_rows = min(self.max_rows, int(scheduling.max_num_seqs))
        self._builders = self._make_builders()

    def run(self, batch: Batch, rows: RowSet, limit: int) -> Work[None]:
        """Compute all layers of every row, at most `limit` rows in a forward. Yields the rows of each forward."""
        for micro_batch in rows.micro_batches(min(limit, self.max_rows)):
            self._run(batch, micro_batch)
            yield len(micro_batch.index)

    def embed(self, batch: Batch, rows: RowSet) -> Hidden:
        """What the model calls its first decoder layer with."""
        first = self.model.layers[0].decoder
        parts: list[tuple[MicroBatch, Tensor]] = []
        for micro_batch in rows.micro_batches(self.max_rows):
            _, hidden, residual = _inputs_of(first, partial(self._run, batch, micro_batch))
            assert residual is None
            parts.append((micro_batch, hidden))
        return _gather(parts, len(rows)), None

    def project(self, batch: Batch, rows: RowSet, layer: AttentionLayer, hidden: Hidden) -> tuple[Tensor, Tensor]:
        """Fresh keys (rotated) and values of a layer, [rows, kv_heads, head_dim]; its attention is not computed."""
        keys, values = [], []
        for micro_batch in rows.micro_batches(self.max_rows):
            run = partial(self._run_layer, batch, micro_batch, layer, _rows_of(hidden, micro_batch))
            _, key, value = _inputs_of(layer.attention, run)
            keys.append((micro_batch, _by_head(layer, key)))
            values.append((micro_batch, _by_head(layer, value)))
        return _gather(keys, len(rows)), _gather(values, len(rows))

    def run_layer(self, batch: Batch, rows: RowSet, layer: AttentionLayer, hidden: Hidden, limit: int) -> Work[Hidden]:
        """Compute one decoder layer of every row; yields after each forward, as `run`, what it is worth in rows."""
        states, residuals = [], []
        for micro_batch in rows.micro_batches(min(limit * len(self.model.layers), self.max_rows)):
            state, residual = self._run_layer(batch, micro_batch, layer, _rows_of(hidden, micro_batch))
            states.append((micro_batch, state))
            residuals.append((micro_batch, residual))
            yield len(micro_batch.index) / len(self.model.layers)
        return _gather(states, len(rows)), _gather(residuals, len(rows))

    def _run(self, batch: Batch, micro_batch: MicroBatch) -> None:
        run, position = micro_batch.rows()
        tokens, device = batch.tokens[batch.start[micro_batch.owner[run]] + position], self.model.device
        with self._context(batch, micro_batch):
            self.model.module(torch.from_numpy(tokens).to(device), torch.from_numpy(position).to(device), None, None)

    def _run_layer(
        self, batch: Batch, micro_batch: MicroBatch, layer: AttentionLayer, hidden: Hidden
    ) -> tuple[Tensor, Tensor]:
        positions = torch.from_numpy(micro_batch.rows()[1]).to(self.model.device)
        with self._context(batch, micro_batch):
            return layer.decoder(positions, *hidden)  # type: ignore[no-any-return]

    @contextmanager
    def _context(self, batch: Batch, micro_batch: MicroBatch) -> Iterator[None]:
        """vLLM's forward context, in which every run [a, b) is a sequence of length b over its prompt's blocks."""
        from vllm.forward_context import set_forward_context

        common = self._common_metadata(batch, micro_batch)
        built: dict[int, Any] = {}
        metadata = {}
        for layer, (builder, ratio) in zip(self.model.layers, self._builders, strict=True):
            if id(builder) not in built:
                built[id(builder)] = builder.build(0, _in_kernel_blocks(common, ratio), fast_build=True)
            metadata[layer.name] = built[id(builder)]
        slots = {layer.name: common.slot_mapping for layer in self.model.layers}
        with set_forward_context(
            metadata, self.model.config, num_tokens=len(micro_batch.index), slot_mapping=slots, skip_compiled=True
        ):
            yield

    def _common_metadata(self, batch: Batch, micro_batch: MicroBatch) -> Any:
        """vLLM's `CommonAttentionMetadata` of the runs."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device, block_size = self.model.device, self.model.cache_spec.block_size
        length, longest = micro_batch.end - micro_batch.start, int(micro_batch.end.max())
        run, position = micro_batch.rows()
        slots = batch.blocks[micro_batch.owner[run], position // block_size].astype(np.int64) * block_size
        slots += position % block_size
        query_start = torch.from_numpy(np.concatenate([[0], np.cumsum(length)]).astype(np.int32))
        end = torch.from_numpy(micro_batch.end.astype(np.int32))
        table = torch.from_numpy(batch.blocks[:, : -(-longest // block_size)]).to(device)
        return CommonAttentionMetadata(
            query_start_loc=query_start.to(device), query_start_loc_cpu=query_start, seq_lens=end.to(device),
            seq_lens_cpu_upper_bound=end, num_reqs=len(length), num_actual_tokens=len(position),
            max_query_len=int(length.max()), max_seq_len=longest,
            block_table_tensor=table[torch.from_numpy(micro_batch.owner).to(device)],
            slot_mapping=torch.from_numpy(slots).to(device), causal=True,
            positions=torch.from_numpy(position).to(device),
            is_prefilling=torch.ones(len(length), dtype=torch.bool),
        )  # fmt: skip

    def _make_builders(self) -> list[tuple[Any, int]]:
        """The metadata builder of every layer, shared by layers alike; and the kernel's blocks per block."""
        from vllm.v1.worker.utils import select_common_block_size

        spec = self.model.cache_spec
        shared: dict[Any, tuple[Any, int]] = {}
        builders = []
        for layer in self.model.layers:
            backend, attention = layer.attention.get_attn_backend(), layer.attention
            alike = (backend, attention.num_heads, str(getattr(attention.impl, "sliding_window", None)))
            if alike not in shared:
                kernel = select_common_block_size(spec.block_size, [backend], [spec])
                builder = backend.get_builder_cls()(
                    spec.copy_with_new_block_size(kernel), [layer.name], self.model.config, self.model.device
                )
                shared[alike] = builder, spec.block_size // kernel
            builders.append(shared[alike])
        return builders


class NarrowingForward:
    """Computes prompts layer by layer for policies that narrow the rows at some layers (CacheBlend §4).

    Their objects are in the blocks already.
    """

    def __init__(self, forward: RowForward, model: Model, loaded: Sequence[LoadedJob]) -> None:
        self._forward, self._loaded, self._batch = forward, loaded, Batch.of_jobs(loaded)
        self._layers = forward.model.layers
        plans = [entry.job.plan for entry in loaded]
        self._checked = [plan.policy.check_layers(len(self._layers)) for plan in plans]
        self._narrowings = []
        for plan in plans:
            prompt = Prompt(model, plan.layout, ())
            self._narrowings.append(Narrowing(prompt, plan.policy, plan.policy.select(prompt), plan.required))

    def run(self, limit: int) -> Work[list[float]]:
        """Compute the rows; returns the mean number of them per layer, of each prompt. Yields as `RowForward.run`."""
        rows, counts = self._rows(), []
        hidden = self._forward.embed(self._batch, rows)
        for index, layer in enumerate(self._layers):
            counts.append([int(narrowing.on.sum()) for narrowing in self._narrowings])
            if any(index in checked for checked in self._checked):
                kept = self._narrow(index, layer, rows, hidden)
                hidden = hidden[0][kept], None if hidden[1] is None else hidden[1][kept]
                rows = self._rows()
            if not len(rows):
                counts += [[0] * len(self._loaded)] * (len(self._layers) - len(counts))
                break
            hidden = yield from self._forward.run_layer(self._batch, rows, layer, hidden, limit)
        return [float(mean) for mean in np.mean(counts, axis=0)]

    def _rows(self) -> RowSet:
        return RowSet.of([narrowing.on for narrowing in self._narrowings])

    def _narrow(self, index: int, layer: AttentionLayer, rows: RowSet, hidden: Hidden) -> Tensor:
        """Keep all fresh K and V of a checked layer, and narrow the rows by them; returns which rows go on."""
        model = self._forward.model
        key, value = self._forward.project(self._batch, rows, layer, hidden)
        kept = []
        for owner, entry in enumerate(self._loaded):
            own = np.flatnonzero(rows.owner == owner)
            own_key, own_value = (part[torch.from_numpy(own).to(part.device)] for part in (key, value))
            slots = model.slots(entry.job.blocks, torch.from_numpy(rows.position[own]))
            model.write(layer, own_key, own_value, slots)
            if index in self._checked[owner]:
                deviation = self._deviation(index, layer, entry, rows.position[own], own_key, own_value)
                own = own[self._narrowings[owner].narrow(index, *deviation)]
            kept.append(own)
        return torch.from_numpy(np.concatenate(kept)).to(key.device)

    def _deviation(
        self, index: int, layer: AttentionLayer, entry: LoadedJob, positions: Ints, key: Tensor, value: Tensor
    ) -> tuple[Scores, Scores]:
        """Squared L2 between fresh and cached K and V over all heads, float32 [rows]; 0 where nothing is cached."""
        model = self._forward.model
        cached_key, cached_value = (part.to(model.device) for part in entry.cached[index])
        cached_key = model.rotate(layer, cached_key, torch.from_numpy(entry.positions).to(model.device))
        position_to_cached = np.full(entry.job.plan.num_context, -1)
        position_to_cached[entry.positions] = np.arange(len(entry.positions))
        cached_index = position_to_cached[positions]
        is_cached = cached_index >= 0
        rows = torch.from_numpy(np.flatnonzero(is_cached)).to(key.device)
        cached_rows = torch.from_numpy(cached_index[is_cached]).to(key.device)
        deviation = torch.zeros(2, len(key), device=key.device)
        for i, (fresh, cached) in enumerate(((key, cached_key), (value, cached_value))):
            deviation[i, rows] = (fresh[rows].float() - cached[cached_rows].float()).square().sum((1, 2))
        of_key, of_value = model.rank.sum_over_heads(deviation).cpu().numpy()
        return of_key, of_value


class _ForwardStopped(Exception):
    """Carries the inputs of a module out of a forward that is not to go on."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def _inputs_of(module: nn.Module, run: Callable[[], object]) -> tuple[Tensor, ...]:
    """What a forward calls a module with; the forward stops there."""

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _ForwardStopped(inputs)

    handle = module.register_forward_pre_hook(stop)
    try:
        run()
    except _ForwardStopped as stopped:
        return stopped.inputs
    finally:
        handle.remove()
    raise AssertionError("a forward did not reach the module that it was to stop at")


def _rows_of(hidden: Hidden, micro_batch: MicroBatch) -> Hidden:
    index = torch.from_numpy(micro_batch.index).to(hidden[0].device)
    return hidden[0][index], None if hidden[1] is None else hidden[1][index]


def _gather(parts: Sequence[tuple[MicroBatch, Tensor]], count: int) -> Tensor:
    """The rows of all micro-batches in the set's own order."""
    out = parts[0][1].new_empty(count, *parts[0][1].shape[1:])
    for micro_batch, tensor in parts:
        out[torch.from_numpy(micro_batch.index).to(out.device)] = tensor
    return out


def _by_head(layer: AttentionLayer, flat: Tensor) -> Tensor:
    return flat.reshape(len(flat), layer.attention.num_kv_heads, -1).clone()


def _in_kernel_blocks(common: Any, ratio: int) -> Any:
    """The metadata with a block table of the kernel's smaller blocks."""
    if ratio == 1:
        return common
    table = common.block_table_tensor
    kernel = table[..., None] * ratio + torch.arange(ratio, dtype=table.dtype, device=table.device)
    return common.replace(block_table_tensor=kernel.flatten(1))
