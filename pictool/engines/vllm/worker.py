"""The worker's side: loads objects into blocks, computes rows of linked requests, compiles chunks, step by step."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from pictool.compiler.compile import CODEC
from pictool.core import Target
from pictool.engines.vllm.forward import Batch, Ints, NarrowingForward, RowForward, RowSet, Work
from pictool.engines.vllm.kv import LoadedJob, ObjectReader, WorkerModel
from pictool.engines.vllm.loading import Loading
from pictool.engines.vllm.messages import CompileJob, FailedJob, Job, LinkJob, Outcome
from pictool.engines.vllm.request import Problem
from pictool.errors import PicError
from pictool.runtime.model import Model
from pictool.runtime.tensors import to_bytes
from pictool.store.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store

THREADS = 4  # that read objects and write compiled ones
IDLE_S = 0.01  # how long a step without other work waits for objects that are being read
_log = logging.getLogger("vllm.pictool")


@dataclass(frozen=True)
class Budget:
    """What a step does for links at most: bytes of KV that are copied, rows that are computed through all layers.

    A step without other work copies for `IDLE_S` whatever it finds.
    """

    max_bytes: int
    max_rows: int


@dataclass
class _Computing:
    """Jobs whose rows are computed together, part by part; `work` returns the mean of rows per layer of each."""

    outcomes: dict[str, Outcome]
    work: Work[Sequence[float]]
    seconds: float = 0.0


class WorkerSide:
    """The connector on one rank.

    Jobs go on from step to step: objects are read by threads, and a step copies and computes no more than its budget,
    so that no request waits for the links of others. An exception, whatever it is, is the outcome of its jobs.

    Args:
        forward: of vLLM's model.
        model: the same model as policies see it, without its weights.
        budget: of a step that has work of its own.
    """

    def __init__(self, forward: RowForward, store: Store, model: Model, budget: Budget) -> None:
        self._forward, self._store, self._model, self._budget = forward, store, model, budget
        self._threads = ThreadPoolExecutor(THREADS, "pic-read")
        self._loading: dict[str, Loading] = {}  # by request id
        self._computing: deque[_Computing] = deque()
        self._writing: dict[str, Future[None]] = {}

    def step(self, jobs: Sequence[Job], target: Target, is_idle: bool) -> dict[str, Outcome]:
        """Go on with the jobs of earlier steps and with these; returns the outcomes of those that ended.

        Every rank does the same. They agree on what is loaded and what failed before they compute rows, and after it.

        Args:
            is_idle: the step has no other work: nobody waits for its end.
        """
        outcomes = {job.request_id: Outcome(job.problem) for job in jobs if isinstance(job, FailedJob)}
        self._loading |= {job.request_id: self._start(job, target) for job in jobs if isinstance(job, LinkJob)}
        self._copy(*((math.inf, IDLE_S) if is_idle else (self._budget.max_bytes, 0.0)))
        outcomes |= self._take_loaded()
        for job in jobs:
            if isinstance(job, CompileJob):
                self._computing.append(_Computing({job.request_id: Outcome()}, self._compile(job, target)))
        outcomes |= self._compute(self._budget.max_rows)
        return outcomes | self._take_written(IDLE_S if is_idle else 0.0)

    def shutdown(self) -> None:
        """Read no more."""
        for loading in self._loading.values():
            loading.close()
        self._threads.shutdown(wait=True)

    # Loading

    def _start(self, job: LinkJob, target: Target) -> Loading:
        model = self._forward.model
        reader = partial(ObjectReader, self._store, target, job, model.rank.heads, model.device.type == "cuda")
        checked = job.plan.policy.check_layers(len(model.layers)) if job.rows is None else ()
        return Loading(job, self._threads, reader, checked)

    def _copy(self, max_bytes: float, wait_s: float) -> None:
        """Copy what was read, job by job in their order; wait for what is being read no longer than `wait_s`."""
        deadline = time.perf_counter() + wait_s
        for loading in self._loading.values():
            while loading.loaded is None and loading.problem is None and max_bytes > 0:
                try:
                    copied = loading.copy(self._forward.model, max_bytes)
                except Exception as error:
                    loading.problem = _problem(error)
                    break
                max_bytes -= copied
                left = deadline - time.perf_counter()
                if left <= 0 and (wait_s or not copied):
                    break
                if not copied:
                    loading.wait(left)

    def _take_loaded(self) -> dict[str, Outcome]:
        """What every rank has loaded goes on to be computed; returns the outcomes of what failed on any."""
        outcomes, ready = {}, []
        entries = list(self._loading.items())
        agreed = self._forward.model.rank.agree(
            [loading.problem for _, loading in entries], [loading.loaded is not None for _, loading in entries]
        )
        for (name, loading), (problem, is_loaded) in zip(entries, agreed, strict=True):
            if problem is not None or is_loaded:
                del self._loading[name]
                loading.close()
                outcome = Outcome(problem, load_s=loading.seconds)
                if problem is not None:
                    outcomes[name] = outcome
                else:
                    assert loading.loaded is not None
                    ready.append((outcome, loading.loaded))
        for is_narrowing, compute in ((False, self._static), (True, self._narrowing)):
            chosen = [(outcome, entry) for outcome, entry in ready if (entry.job.rows is None) is is_narrowing]
            if chosen:
                before = {entry.job.request_id: outcome for outcome, entry in chosen}
                self._computing.append(_Computing(before, compute([entry for _, entry in chosen])))
        return outcomes

    # Computing

    def _compute(self, max_rows: float) -> dict[str, Outcome]:
        """Go on with what is being computed, in its order, until `max_rows` are spent; returns the outcomes."""
        outcomes: dict[str, Outcome] = {}
        while self._computing and max_rows > 0:
            current, started = self._computing[0], time.perf_counter()
            try:
                max_rows -= next(current.work)
            except StopIteration as done:
                self._computing.popleft()
                current.seconds += time.perf_counter() - started
                outcomes |= _share(current, done.value)
            except Exception as error:
                self._computing.popleft()
                problem = _problem(error)
                outcomes |= {name: replace(outcome, problem=problem) for name, outcome in current.outcomes.items()}
            else:
                current.seconds += time.perf_counter() - started
        agreed = self._forward.model.rank.agree(
            [outcome.problem for outcome in outcomes.values()], [True] * len(outcomes)
        )
        return {
            name: replace(outcome, problem=problem)
            for (name, outcome), (problem, _) in zip(outcomes.items(), agreed, strict=True)
            if problem is not None or name not in self._writing
        }

    def _static(self, loaded: Sequence[LoadedJob]) -> Work[Sequence[float]]:
        """Compute the rows of static policies."""
        masks = []
        for entry in loaded:
            assert entry.job.rows is not None
            masks.append(entry.job.rows & (np.arange(len(entry.job.rows)) >= entry.job.computed))
        yield from self._forward.run(Batch.of_jobs(loaded), RowSet.of(masks), self._budget.max_rows)
        return [int(mask.sum()) for mask in masks]

    def _narrowing(self, loaded: Sequence[LoadedJob]) -> Work[Sequence[float]]:
        """Compute the rows of policies that narrow them, layer by layer."""
        return (yield from NarrowingForward(self._forward, self._model, loaded).run(self._budget.max_rows))

    # Compiling

    def _compile(self, job: CompileJob, target: Target) -> Work[Sequence[float]]:
        """Compute a chunk after its sinks, and hand its object to a thread that writes it; the first rank writes."""
        forward, rank = self._forward, self._forward.model.rank
        rows, capture = RowSet.of([np.ones(len(job.tokens), dtype=bool)]), _KVCapture(forward.model)
        work = forward.run(Batch.of([job.tokens], [job.blocks]), rows, self._budget.max_rows)
        while True:
            with capture.hooks():  # not between two parts: there vLLM computes other requests
                num_rows = next(work, None)
            if num_rows is None:
                break
            yield num_rows
        limit = min(self._budget.max_rows, forward.max_rows)
        order = np.concatenate([micro_batch.index for micro_batch in rows.micro_batches(limit)])
        layers = []
        for keys_and_values in zip(capture.keys, capture.values, strict=True):
            parts = (_in_order(part, order, len(rank.heads)) for part in keys_and_values)
            layers.append([rank.gather_heads(part)[job.sinks :].transpose(0, 1).contiguous() for part in parts])
        write = partial(self._write, job, target, layers) if rank.is_first else _nothing
        self._writing[job.request_id] = self._threads.submit(write)
        return [0.0]

    def _write(self, job: CompileJob, target: Target, layers: Sequence[Sequence[Tensor]]) -> None:
        tokens = job.tokens[job.sinks :]
        dummy = int(job.tokens[0]) if job.sinks else None
        own = target.identify(tokens, job.sinks, CODEC, job.salt, dummy)
        meta = ObjectMeta(own.key, target, len(tokens), job.sinks, CODEC, dummy=dummy, salted=own.salted)
        data = [(to_bytes(key), to_bytes(value)) for key, value in layers]
        self._store.put(CompiledChunk(meta, job.text, tokens, data))

    def _take_written(self, wait_s: float) -> dict[str, Outcome]:
        """The outcomes of compiled objects that are in the store now."""
        names, futures = list(self._writing), list(self._writing.values())
        wait(futures, wait_s)
        errors = [future.exception() if future.done() else None for future in futures]
        agreed = self._forward.model.rank.agree(
            [None if error is None else _problem(error) for error in errors], [future.done() for future in futures]
        )
        outcomes = {}
        for name, (problem, is_done) in zip(names, agreed, strict=True):
            if is_done:
                del self._writing[name]
                outcomes[name] = Outcome(problem)
        return outcomes


def _share(computed: _Computing, counts: Sequence[float]) -> dict[str, Outcome]:
    """The outcomes of jobs that were computed together; they share the seconds by their rows."""
    seconds_per_row = computed.seconds / max(1.0, sum(counts))
    return {
        name: replace(outcome, recomputed=count, recompute_s=seconds_per_row * count)
        for (name, outcome), count in zip(computed.outcomes.items(), counts, strict=True)
    }


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


def _nothing() -> None:
    """What a rank writes that is not the first."""


def _problem(error: BaseException) -> Problem:
    """What the client and the log are told; an exception that nobody expects is logged whole."""
    if not isinstance(error, PicError):
        _log.warning("pic: unexpected", exc_info=error)
    return Problem.of(error)
