"""The worker's side: loads objects into blocks, computes the rows of a step's requests, compiles chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from pictool.compiler.compile import CODEC
from pictool.core import Target
from pictool.engines.vllm.forward import Batch, Ints, NarrowingForward, RowForward, RowSet
from pictool.engines.vllm.kv import LoadedJob, ObjectReader, WorkerModel
from pictool.engines.vllm.messages import CompileJob, LinkJob, Outcome
from pictool.errors import PicError
from pictool.runtime.model import Model
from pictool.runtime.tensors import to_bytes
from pictool.store.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store


class WorkerSide:
    """The connector on one rank.

    Args:
        forward: of vLLM's model.
        model: the same model as policies see it, without its weights.
    """

    def __init__(self, forward: RowForward, store: Store, model: Model) -> None:
        self._forward, self._store, self._model = forward, store, model

    def run(self, jobs: Sequence[LinkJob | CompileJob], target: Target) -> dict[str, Outcome]:
        """Do the jobs of a step: load, compute static rows, compute rows that are narrowed, compile.

        Every rank does the same. They agree on the jobs that failed before they compute rows.
        """
        outcomes, loaded = self._load_all([job for job in jobs if isinstance(job, LinkJob)], target)
        outcomes |= self._compute_static([entry for entry in loaded if entry.job.rows is not None], outcomes)
        outcomes |= self._compute_narrowing([entry for entry in loaded if entry.job.rows is None], outcomes)
        for job in jobs:
            if isinstance(job, CompileJob):
                outcomes[job.request_id] = self._compile(job, target)
        return outcomes

    def _load_all(self, jobs: Sequence[LinkJob], target: Target) -> tuple[dict[str, Outcome], list[LoadedJob]]:
        """Load the objects of all jobs; returns the outcomes so far, and the jobs that no rank failed to load."""
        outcomes, loaded = {}, []
        for job in jobs:
            started, problem = time.perf_counter(), None
            try:
                loaded.append(self._load(job, target))
            except PicError as error:
                problem = str(error)
            outcomes[job.request_id] = Outcome(problem, load_s=time.perf_counter() - started)
        problems = self._forward.model.rank.merge_problems([outcomes[job.request_id].problem for job in jobs])
        for job, problem in zip(jobs, problems, strict=True):
            outcomes[job.request_id] = replace(outcomes[job.request_id], problem=problem)
        return outcomes, [entry for entry in loaded if outcomes[entry.job.request_id].problem is None]

    def _load(self, job: LinkJob, target: Target) -> LoadedJob:
        """Write a job's objects into its blocks; nothing of a layer is written before its checksum is checked."""
        model = self._forward.model
        checked = job.plan.policy.check_layers(len(model.layers)) if job.rows is None else ()
        cached = {}
        with ObjectReader(self._store, target, job, model.rank.heads) as reader:
            positions = torch.from_numpy(reader.positions)
            on_device, slots = positions.to(model.device), model.slots(job.blocks, positions)
            for index, (layer, kv) in enumerate(zip(model.layers, reader.layers(), strict=True)):
                key, value = (part.to(model.device) for part in kv)
                model.write(layer, model.rotate(layer, key, on_device), value, slots)
                if index in checked:
                    cached[index] = kv
            return LoadedJob(job, reader.positions, cached)

    def _compute_static(self, loaded: Sequence[LoadedJob], outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
        """Compute the rows of static policies in one go; the seconds are shared by rows."""
        started, masks = time.perf_counter(), []
        for entry in loaded:
            assert entry.job.rows is not None
            masks.append(entry.job.rows & (np.arange(len(entry.job.rows)) >= entry.job.computed))
        rows = RowSet.of(masks)
        if len(rows):
            self._forward.run(Batch.of_jobs(loaded), rows)
        seconds_per_row = (time.perf_counter() - started) / max(1, len(rows))
        return {
            name: replace(outcomes[name], recomputed=count, recompute_s=seconds_per_row * count)
            for name, count in zip(_names(loaded), [int(mask.sum()) for mask in masks], strict=True)
        }

    def _compute_narrowing(self, loaded: Sequence[LoadedJob], outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
        """Compute the rows of policies that narrow them, layer by layer; the seconds are shared equally."""
        if not loaded:
            return {}
        started = time.perf_counter()
        counts = NarrowingForward(self._forward, self._model, loaded).run()
        seconds = (time.perf_counter() - started) / len(loaded)
        return {
            name: replace(outcomes[name], recomputed=count, recompute_s=seconds)
            for name, count in zip(_names(loaded), counts, strict=True)
        }

    def _compile(self, job: CompileJob, target: Target) -> Outcome:
        """Compute a chunk after its sinks, and write its object; the first rank writes."""
        forward, rank = self._forward, self._forward.model.rank
        rows = RowSet.of([np.ones(len(job.tokens), dtype=bool)])
        with _KVCapture(forward.model).hooks() as capture:
            forward.run(Batch([job.tokens], [job.blocks]), rows)
        order = np.concatenate([micro_batch.index for micro_batch in rows.micro_batches(forward.max_rows)])
        layers = []
        for keys_and_values in zip(capture.keys, capture.values, strict=True):
            parts = (_in_order(part, order, len(rank.heads)) for part in keys_and_values)
            layers.append([rank.gather_heads(part)[job.sinks :].transpose(0, 1).contiguous() for part in parts])
        if not rank.is_first:
            return Outcome()
        tokens = job.tokens[job.sinks :]
        dummy = int(job.tokens[0]) if job.sinks else None
        own = target.identify(tokens, job.sinks, CODEC, job.salt, dummy)
        meta = ObjectMeta(own.key, target, len(tokens), job.sinks, CODEC, dummy=dummy, salted=own.salted)
        try:
            data = [(to_bytes(key), to_bytes(value)) for key, value in layers]
            self._store.put(CompiledChunk(meta, job.text, tokens, data))
        except PicError as error:
            return Outcome(str(error))
        return Outcome()


class _KVCapture:
    """Un-rotated keys, and values, of a forward by layer; one entry per micro-batch."""

    def __init__(self, model: WorkerModel) -> None:
        self._model, self._rotary_key = model, torch.empty(0)
        self.keys: list[list[Tensor]] = [[] for _ in model.layers]
        self.values: list[list[Tensor]] = [[] for _ in model.layers]

    @contextmanager
    def hooks(self) -> Iterator[_KVCapture]:
        """Layers may share a rotary embedding: its last input is the key of the attention that runs next."""
        rotaries = {id(layer.rotary): layer.rotary for layer in self._model.layers}
        handles = [rotary.register_forward_pre_hook(self._see_key) for rotary in rotaries.values()]
        for index, layer in enumerate(self._model.layers):
            handles.append(layer.attention.register_forward_pre_hook(self._keeper(index)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _see_key(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._rotary_key = inputs[2].clone()

    def _keeper(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.keys[index].append(self._rotary_key)
            self.values[index].append(inputs[2].clone())

        return keep


def _in_order(parts: list[Tensor], order: Ints, num_heads: int) -> Tensor:
    """[tokens, kv_heads, head_dim] by position, of parts that hold the rows in `order`."""
    flat = torch.cat([part.reshape(len(part), num_heads, -1) for part in parts])
    out = torch.empty_like(flat)
    out[torch.from_numpy(order).to(flat.device)] = flat
    return out


def _names(loaded: Sequence[LoadedJob]) -> list[str]:
    return [entry.job.request_id for entry in loaded]
