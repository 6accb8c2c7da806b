"""The worker's side: brings objects into blocks, computes the rows of a step's requests, says what became of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pictool.core import Target
from pictool.engines.vllm.blend import Blend
from pictool.engines.vllm.capture import compile_chunk
from pictool.engines.vllm.host import Host
from pictool.engines.vllm.kv import Loaded, Reader
from pictool.engines.vllm.messages import CompileJob, LinkJob, Outcome
from pictool.engines.vllm.passes import Passes, Sequences
from pictool.engines.vllm.ranks import agree
from pictool.engines.vllm.rows import RowSet
from pictool.errors import PicError
from pictool.runtime.model import Model
from pictool.store.store import Store


class WorkerSide:
    """Everything that the connector does on one rank."""

    def __init__(self, host: Host, store: Store, model: Model) -> None:
        self._host, self._store, self._model = host, store, model

    def run(self, jobs: Sequence[LinkJob | CompileJob], target: Target) -> dict[str, Outcome]:
        """Do the jobs of a step; every rank does the same, and they agree on what failed before rows are computed."""
        links = [job for job in jobs if isinstance(job, LinkJob)]
        outcomes, loaded = self._load_all(links, target)
        static = [one for one in loaded if one.job.rows is not None]
        dynamic = [one for one in loaded if one.job.rows is None]
        outcomes = _timed(outcomes, static, self._recompute(static))
        started = time.perf_counter()
        if dynamic:
            recomputed = Blend(self._host, self._model, dynamic).run()
            share = (time.perf_counter() - started) / len(dynamic)
            outcomes = _timed(
                outcomes, dynamic, dict(zip(_names(dynamic), [(rows, share) for rows in recomputed], strict=True))
            )
        for job in jobs:
            if isinstance(job, CompileJob):
                outcomes[job.request_id] = compile_chunk(self._host, self._store, target, job)
        return outcomes

    def _load_all(self, jobs: Sequence[LinkJob], target: Target) -> tuple[dict[str, Outcome], list[Loaded]]:
        outcomes, loaded = {}, []
        for job in jobs:
            started, problem = time.perf_counter(), None
            try:
                loaded.append(self._load(job, target))
            except PicError as error:
                problem = str(error)
            outcomes[job.request_id] = Outcome(problem, load_s=time.perf_counter() - started)
        problems = agree([outcomes[job.request_id].problem for job in jobs])
        for job, problem in zip(jobs, problems, strict=True):
            outcomes[job.request_id] = replace(outcomes[job.request_id], problem=problem)
        return outcomes, [one for one in loaded if outcomes[one.job.request_id].problem is None]

    def _load(self, job: LinkJob, target: Target) -> Loaded:
        """Bring a job's objects; nothing of a layer is used before its checksum holds."""
        checked = job.plan.policy.check_layers(len(self._host.layers)) if job.rows is None else ()
        held = {}
        with Reader(self._store, target, job, self._host.heads) as reader:
            positions = reader.positions.to(self._host.device)
            slots = self._host.slots(job.blocks, reader.positions)
            for index, (layer, kv) in enumerate(zip(self._host.layers, reader.layers(), strict=True)):
                key, value = (one.to(self._host.device) for one in kv)
                self._host.write(layer, self._host.rotate(layer, key, positions), value, slots)
                if index in checked:
                    held[index] = kv
            return Loaded(job, reader.positions.numpy(), held)

    def _recompute(self, loaded: Sequence[Loaded]) -> dict[str, tuple[float, float]]:
        """The rows of all static jobs in one go; (rows, seconds) of each, the time shared by rows."""
        started, masks = time.perf_counter(), []
        for one in loaded:
            assert one.job.rows is not None
            masks.append(one.job.rows & (np.arange(len(one.job.rows)) >= one.job.computed))
        rows = RowSet.of(masks)
        if len(rows):
            sequences = Sequences([one.job.plan.layout.tokens for one in loaded], [one.job.blocks for one in loaded])
            Passes(self._host, sequences).run(rows)
        seconds = time.perf_counter() - started
        counts = [int(mask.sum()) for mask in masks]
        return {
            name: (count, seconds * count / max(1, len(rows)))
            for name, count in zip(_names(loaded), counts, strict=True)
        }


def _names(loaded: Sequence[Loaded]) -> list[str]:
    return [one.job.request_id for one in loaded]


def _timed(
    outcomes: dict[str, Outcome], loaded: Sequence[Loaded], computed: dict[str, tuple[float, float]]
) -> dict[str, Outcome]:
    """The outcomes with rows and seconds of what was computed."""
    done = {
        name: replace(outcomes[name], recomputed=computed[name][0], recompute_s=computed[name][1])
        for name in _names(loaded)
    }
    return outcomes | done
