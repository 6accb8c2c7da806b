"""Forwards of chosen rows through vLLM's model, layer by layer and piece by piece, with narrowing between layers.

Rows are virtual sequences: every run of consecutive positions [a, b) of a prompt is a sequence of length b whose last
b - a tokens are computed. Each of them attends to all earlier positions of its prompt: their K and V are in the blocks.

A forward is a generator: it stops before each piece of a layer, and goes on, in a later step if need be, with as many
rows as it is sent. In each layer rows go by position, so that whatever a row attends to is in place before it is
computed, or is written with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pictool.core import RowMask, TokenIds
from pictool.engines.vllm.messages import Adapter
from pictool.engines.vllm.worker.kv import AttentionLayer, LoadedJob, WorkerModel
from pictool.linker.narrowing import Narrowing
from pictool.linker.policies.base import Prompt, Scores
from pictool.runtime.model import Model

Ints = NDArray[np.int64]
_ROOM_FOR_SEQUENCES = {"FLASHINFER", "FLEX_ATTENTION"}
T = TypeVar("T")


@dataclass(frozen=True)
class ForwardPiece:
    """What comes next in a forward: at most so many rows, of a layer or of what comes before the first.

    Pieces of the same kind cost about the same per row.
    """

    kind: Hashable
    rows: int


SeeKV = Callable[["MicroBatch", Tensor, Tensor], None]
Work = Generator[
    ForwardPiece, int, T
]  # before each piece it is sent how many rows this one has, 1 … `ForwardPiece.rows`


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a forward: their token ids one after another, where each begins, their blocks, one adapter."""

    tokens: Ints  # [tokens of all prompts]
    start: Ints  # [prompts]
    blocks: NDArray[np.int32]  # [prompts, most blocks], filled up with 0
    adapter: Adapter | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[TokenIds], blocks: Sequence[Sequence[int]], adapter: Adapter | None = None
    ) -> PromptBatch:
        table = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
        for row, numbers in zip(table, blocks, strict=True):
            row[: len(numbers)] = numbers
        lengths = np.cumsum([0, *map(len, tokens)])
        return cls(np.concatenate(tokens).astype(np.int64), lengths[:-1], table, adapter)

    @classmethod
    def of_jobs(cls, loaded: Sequence[LoadedJob]) -> PromptBatch:
        jobs = [entry.job for entry in loaded]
        return cls.of([job.plan.layout.tokens for job in jobs], [job.blocks for job in jobs], jobs[0].adapter)


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

    def parts(self, limit: int) -> Iterator[RowSet]:
        """The rows in sets of at most `limit`."""
        for first in range(0, len(self), limit):
            yield RowSet(self.owner[first : first + limit], self.position[first : first + limit])

    def micro_batch(self, first: int, last: int) -> MicroBatch:
        """Rows [first, last) as runs, the short ones first, as some backends want them."""
        owner, position = self.owner[first:last], self.position[first:last]
        is_new = np.concatenate([[True], (np.diff(owner) != 0) | (np.diff(position) != 1)])
        begin = np.flatnonzero(is_new)
        length = np.diff(np.append(begin, last - first))
        order = np.argsort(length, kind="stable")
        begin, length = begin[order], length[order]
        index = first + np.repeat(begin - np.cumsum(length) + length, length) + np.arange(length.sum())
        return MicroBatch(index, owner[begin], position[begin], position[begin] + length)


@dataclass(frozen=True)
class Hidden:
    """Hidden states between two layers, and the residual: [rows, hidden] each.

    It is None before the first layer, and in models whose layers add it themselves (Granite).
    """

    states: Tensor
    residual: Tensor | None = None

    def of(self, index: Ints) -> Hidden:
        """A copy of some rows."""
        at = torch.from_numpy(index).to(self.states.device)
        return Hidden(self.states[at], None if self.residual is None else self.residual[at])


class RowForward:
    """Computes rows of prompts with vLLM's model; their K and V replace those in the blocks.

    Attention metadata come from builders of our own: the model runner's are in use for its own step.
    """

    def __init__(self, model: WorkerModel) -> None:
        self.model = model
        scheduling, backends = model.config.scheduler_config, {layer.backend for layer in model.layers}
        self.max_rows = int(scheduling.max_num_batched_tokens)
        if backends & _ROOM_FOR_SEQUENCES:  # their metadata have room for so many, and each row may be one
            self.max_rows = min(self.max_rows, int(scheduling.max_num_seqs))
        self._builders = self._make_builders()  # by layer's name

    def run(self, batch: PromptBatch, rows: RowSet, limit: int) -> Work[None]:
        """Compute K and V of every row in all layers. The hidden states of `limit` rows are kept at a time."""
        *layers, last = self.model.layers
        for part in rows.parts(min(limit, self.max_rows)):
            hidden = yield from self.embed(batch, part)
            for layer in layers:
                hidden = yield from self.run_layer(batch, part, layer, hidden)
            yield from self.project(batch, part, last, hidden)

    def embed(self, batch: PromptBatch, rows: RowSet) -> Work[Hidden]:
        """What the model calls its first decoder layer with."""
        first = self.model.layers[0]
        parts: list[Tensor] = []

        def embed(micro_batch: MicroBatch) -> None:
            inputs = _inputs_of(first.decoder, partial(self._run, batch, micro_batch))
            hidden = inputs[first.parameters.index("hidden_states")]
            part = torch.empty_like(hidden)
            part[torch.from_numpy(micro_batch.index - micro_batch.index.min()).to(hidden.device)] = hidden
            parts.append(part)

        yield from self.in_pieces("embed", rows, embed)
        return Hidden(torch.cat(parts))

    def run_layer(self, batch: PromptBatch, rows: RowSet, layer: AttentionLayer, hidden: Hidden) -> Work[Hidden]:
        """Compute one decoder layer of every row; `hidden` is overwritten."""
        states, residual = hidden.states, hidden.residual
        if residual is None and "residual" in layer.parameters:
            residual = torch.empty_like(states)

        def run(micro_batch: MicroBatch) -> None:
            index = torch.from_numpy(micro_batch.index).to(states.device)
            done = self._run_layer(batch, micro_batch, layer, hidden)
            states[index] = done.states
            if residual is not None:
                assert done.residual is not None
                residual[index] = done.residual

        alike, _ = self._builders[layer.name]  # a window is its builder's
        yield from self.in_pieces(("layer", id(alike)), rows, run)
        return Hidden(states, residual)

    def project(
        self, batch: PromptBatch, rows: RowSet, layer: AttentionLayer, hidden: Hidden, see: SeeKV | None = None
    ) -> Work[None]:
        """Compute and write fresh K and V of a layer; its attention, and what follows, is not computed.

        `see` is called with the rows of every piece, their keys (rotated) and values [rows, kv_heads, head_dim].
        """

        def project(micro_batch: MicroBatch) -> None:
            run = partial(self._run_layer, batch, micro_batch, layer, hidden)
            key, value = (_by_head(layer, part) for part in layer.keys_and_values(_inputs_of(layer.attention, run)))
            self.model.write(layer, key, value, self._slots(batch, micro_batch))
            if see is not None:
                see(micro_batch, key, value)

        yield from self.in_pieces(("project", see is None), rows, project)

    def in_pieces(self, kind: Hashable, rows: RowSet, compute: Callable[[MicroBatch], None]) -> Work[None]:
        """Call `compute` with the rows, piece by piece."""
        first = 0
        while first < len(rows):
            last = first + (yield ForwardPiece((kind, len(rows)), min(len(rows) - first, self.max_rows)))
            compute(rows.micro_batch(first, last))
            first = last

    def _run(self, batch: PromptBatch, micro_batch: MicroBatch) -> None:
        run, position = micro_batch.rows()
        tokens, device = batch.tokens[batch.start[micro_batch.owner[run]] + position], self.model.device
        with self._context(batch, micro_batch):
            self.model.module(torch.from_numpy(tokens).to(device), torch.from_numpy(position).to(device), None, None)

    def _run_layer(self, batch: PromptBatch, micro_batch: MicroBatch, layer: AttentionLayer, hidden: Hidden) -> Hidden:
        positions = torch.from_numpy(micro_batch.rows()[1]).to(self.model.device)
        with self._context(batch, micro_batch):
            own = hidden.of(micro_batch.index)
            values = {"positions": positions, "hidden_states": own.states, "residual": own.residual}
            done = layer.decoder(*(values[name] for name in layer.parameters))
        return Hidden(*done) if "residual" in layer.parameters else Hidden(done)

    @contextmanager
    def _context(self, batch: PromptBatch, micro_batch: MicroBatch) -> Iterator[None]:
        """vLLM's forward context, in which every run [a, b) is a sequence of length b over its prompt's blocks."""
        from vllm.forward_context import set_forward_context

        common = self._common_metadata(batch, micro_batch)
        built: dict[int, Any] = {}
        metadata = {}
        for name, (builder, ratio) in self._builders.items():
            if id(builder) not in built:
                built[id(builder)] = builder.build(0, _in_kernel_blocks(common, ratio), fast_build=True)
            metadata[name] = built[id(builder)]
        slots = {layer.name: common.slot_mapping for layer in self.model.layers}
        num_tokens = len(micro_batch.index)
        with (
            self.model.under(batch.adapter, num_tokens),
            set_forward_context(
                metadata, self.model.config, num_tokens=num_tokens, slot_mapping=slots, skip_compiled=True
            ),
        ):
            yield

    def _common_metadata(self, batch: PromptBatch, micro_batch: MicroBatch) -> Any:
        """vLLM's `CommonAttentionMetadata` of the runs."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device, block_size = self.model.device, self.model.cache_spec.block_size
        length, longest = micro_batch.end - micro_batch.start, int(micro_batch.end.max())
        _, position = micro_batch.rows()
        query_start = torch.from_numpy(np.concatenate([[0], np.cumsum(length)]).astype(np.int32))
        end = torch.from_numpy(micro_batch.end.astype(np.int32))
        table = torch.from_numpy(batch.blocks[:, : -(-longest // block_size)]).to(device)
        return CommonAttentionMetadata(
            query_start_loc=query_start.to(device), query_start_loc_cpu=query_start, seq_lens=end.to(device),
            seq_lens_cpu_upper_bound=end, num_reqs=len(length), num_actual_tokens=len(position),
            max_query_len=int(length.max()), max_seq_len=longest,
            block_table_tensor=table[torch.from_numpy(micro_batch.owner).to(device)],
            slot_mapping=self._slots(batch, micro_batch), causal=True,
            positions=torch.from_numpy(position).to(device),
            is_prefilling=torch.ones(len(length), dtype=torch.bool),
        )  # fmt: skip

    def _slots(self, batch: PromptBatch, micro_batch: MicroBatch) -> Tensor:
        """The slots of the rows in the KV cache, int64 on the device."""
        run, position = micro_batch.rows()
        block_size = self.model.cache_spec.block_size
        slots = batch.blocks[micro_batch.owner[run], position // block_size].astype(np.int64) * block_size
        return torch.from_numpy(slots + position % block_size).to(self.model.device)

    def _make_builders(self) -> dict[str, tuple[Any, int]]:
        """The metadata builder of every layer, shared by layers alike; and the kernel's blocks per block."""
        from vllm.v1.worker.utils import select_common_block_size

        spec = self.model.cache_spec
        shared: dict[Any, tuple[Any, int]] = {}
        builders = {}
        for layer in self.model.layers:
            backend, attention = layer.attention.get_attn_backend(), layer.attention
            alike = (backend, attention.num_heads, str(getattr(attention.impl, "sliding_window", None)))
            if alike not in shared:
                kernel = int(select_common_block_size(spec.block_size, [backend], [spec]))
                builder = backend.get_builder_cls()(
                    spec.copy_with_new_block_size(kernel), [layer.name], self.model.config, self.model.device
                )
                shared[alike] = builder, spec.block_size // kernel
            builders[layer.name] = shared[alike]
        return builders


class NarrowingForward:
    """Computes prompts layer by layer for policies that narrow the rows at some layers (CacheBlend §4).

    Their objects are in the blocks already.
    """

    def __init__(self, forward: RowForward, model: Model, loaded: Sequence[LoadedJob]) -> None:
        self._forward, self._loaded, self._batch = forward, loaded, PromptBatch.of_jobs(loaded)
        self._layers = forward.model.layers
        jobs = [entry.job for entry in loaded]
        self._checked = [job.plan.policy.check_layers(len(self._layers)) for job in jobs]
        self._cached_index = [_cached_index(entry) for entry in loaded]
        self._narrowings = []
        for job in jobs:
            assert job.first is not None
            prompt = Prompt(model, job.plan.layout, ())
            self._narrowings.append(Narrowing(prompt, job.plan.policy, job.first, job.plan.required))

    def run(self) -> Work[list[float]]:
        """Compute the rows; returns the mean number of them per layer, of each prompt."""
        rows, counts = self._rows(), []
        hidden = yield from self._forward.embed(self._batch, rows)
        for index, layer in enumerate(self._layers):
            counts.append([int(narrowing.on.sum()) for narrowing in self._narrowings])
            if any(index in checked for checked in self._checked):
                hidden = hidden.of((yield from self._narrow(index, layer, rows, hidden)))
                rows = self._rows()
            if not len(rows):
                counts += [[0] * len(self._loaded)] * (len(self._layers) - len(counts))
                break
            if layer is self._layers[-1]:
                yield from self._forward.project(self._batch, rows, layer, hidden)
            else:
                hidden = yield from self._forward.run_layer(self._batch, rows, layer, hidden)
        return [float(mean) for mean in np.mean(counts, axis=0)]

    def _rows(self) -> RowSet:
        return RowSet.of([narrowing.on for narrowing in self._narrowings])

    def _narrow(self, index: int, layer: AttentionLayer, rows: RowSet, hidden: Hidden) -> Work[Ints]:
        """Keep all fresh K and V of a checked layer, and narrow the rows by them; returns which rows go on."""
        of_key, of_value = (np.zeros(len(rows), dtype=np.float32) for _ in range(2))

        def see(micro_batch: MicroBatch, key: Tensor, value: Tensor) -> None:
            at = micro_batch.index
            of_key[at], of_value[at] = self._deviation(index, layer, rows, at, key, value)

        yield from self._forward.project(self._batch, rows, layer, hidden, see)
        kept = []
        for owner, narrowing in enumerate(self._narrowings):
            own = np.flatnonzero(rows.owner == owner)
            if index in self._checked[owner]:
                own = own[narrowing.narrow(index, of_key[own], of_value[own])]
            kept.append(own)
        return np.concatenate(kept)

    def _deviation(
        self, index: int, layer: AttentionLayer, rows: RowSet, at: Ints, key: Tensor, value: Tensor
    ) -> tuple[Scores, Scores]:
        """Squared L2 between fresh and cached K and V of the rows `at`, over all heads; 0 where nothing is cached."""
        model = self._forward.model
        deviation = torch.zeros(2, len(at), device=key.device)
        for owner in np.unique(rows.owner[at]):
            entry = self._loaded[owner]
            if index not in self._checked[owner]:
                continue
            positions, is_own = rows.position[at], rows.owner[at] == owner
            cached_index = self._cached_index[owner][np.where(is_own, positions, 0)]
            is_cached = is_own & (cached_index >= 0)
            of_cached = torch.from_numpy(cached_index[is_cached])
            cached_key, cached_value = (part[of_cached].to(model.device) for part in entry.cached[index])
            cached_key = model.rotate(layer, cached_key, torch.from_numpy(positions[is_cached]).to(model.device))
            chosen = torch.from_numpy(np.flatnonzero(is_cached)).to(key.device)
            for i, (fresh, cached) in enumerate(((key, cached_key), (value, cached_value))):
                deviation[i, chosen] = (fresh[chosen].float() - cached.float()).square().sum((1, 2))
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


def _cached_index(entry: LoadedJob) -> Ints:
    """[context]: where each position is among those that were loaded; -1 if it was not."""
    index = np.full(entry.job.plan.num_context, -1)
    index[entry.positions] = np.arange(len(entry.positions))
    return index


def _by_head(layer: AttentionLayer, flat: Tensor) -> Tensor:
    return flat.reshape(len(flat), layer.attention.num_kv_heads, -1).clone()


def _in_kernel_blocks(common: Any, ratio: int) -> Any:
    """The metadata with a block table of the kernel's smaller blocks."""
    if ratio == 1:
        return common
    table = common.block_table_tensor
    kernel = table[..., None] * ratio + torch.arange(ratio, dtype=table.dtype, device=table.device)
    return common.replace(block_table_tensor=kernel.flatten(1))
