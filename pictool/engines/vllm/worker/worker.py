"""The worker's side: loads objects into blocks, computes rows of linked requests, compiles chunks, step by step."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from pictool.compiler.compile import CODEC
from pictool.core import Target
from pictool.engines.vllm.messages import CompileJob, FailedJob, Job, JobResult, LinkJob
from pictool.engines.vllm.request import Problem
from pictool.engines.vllm.scheduler.matching import adapted
from pictool.engines.vllm.worker.forward import ForwardPiece, NarrowingForward, PromptBatch, RowForward, RowSet, Work
from pictool.engines.vllm.worker.kv import LoadedJob, ObjectReader, WorkerModel, by_rotation
from pictool.engines.vllm.worker.loading import Loading
from pictool.engines.vllm.worker.pace import DeviceClock, PieceSize, StepDeadline, StepTimeLimit
from pictool.engines.vllm.worker.threads import BackgroundThrottle, background_threads
from pictool.errors import ModelError, PicError
from pictool.runtime.memory import streams
from pictool.runtime.model import Model
from pictool.runtime.tensors import to_bytes
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store

THREADS = 4  # that read objects and write compiled ones, at most
FIRST_BYTES, FIRST_ROWS = 1 << 20, 16  # of the first piece that is copied, and of a forward
LATER_SHARE = 0.25  # of a step's time, for what nobody waits for
_log = logging.getLogger("vllm.pictool")


@dataclass(frozen=True)
class StepBudget:
    """What a step that has other work does for links at most.

    Attributes:
        max_bytes: of KV that are copied.
        max_rows: that are computed through all layers (or as much work); a step without other work keeps to it, too.
        step_s: seconds; 0: a share of what an ordinary step takes.
    """

    max_bytes: int
    max_rows: int
    step_s: float = 0.0


class _Computing:
    """Jobs whose rows are computed together, piece by piece; `work` returns the mean of rows per layer of each.

    Attributes:
        counts: what `work` returned, once it is done.
        problem: what it raised.
    """

    def __init__(self, outcomes: dict[str, JobResult], work: Work[Sequence[float]]) -> None:
        self._outcomes, self._work = outcomes, work
        self._sizes: dict[Hashable, PieceSize] = {}
        self._piece: ForwardPiece | None = None
        self._seconds = 0.0
        self.counts: Sequence[float] | None = None
        self.problem: Problem | None = None
        self._go_on(None)

    @property
    def is_over(self) -> bool:
        return self.counts is not None or self.problem is not None

    def next_rows(self, left_s: float) -> int:
        """How many rows of the next piece fit in the time that is left."""
        assert self._piece is not None
        return min(self._piece.rows, self._size.within(left_s))

    def compute(self, rows: int, clock: DeviceClock) -> None:
        """Compute the next piece, of so many rows."""
        size, started = self._size, clock.now()
        self._go_on(rows)
        seconds = clock.now() - started
        size.took(rows, seconds)
        self._seconds += seconds

    def results(self) -> dict[str, JobResult]:
        """The outcomes of the jobs; they share the seconds by their rows."""
        if self.counts is None:
            return {name: replace(outcome, problem=self.problem) for name, outcome in self._outcomes.items()}
        seconds_per_row = self._seconds / max(1.0, sum(self.counts))
        return {
            name: replace(outcome, recomputed=count, recompute_s=seconds_per_row * count)
            for (name, outcome), count in zip(self._outcomes.items(), self.counts, strict=True)
        }

    @property
    def _size(self) -> PieceSize:
        assert self._piece is not None
        return self._sizes.setdefault(self._piece.kind, PieceSize(FIRST_ROWS))

    def _go_on(self, rows: int | None) -> None:
        """Let the work go on to its next piece, or its end."""
        try:
            self._piece = next(self._work) if rows is None else self._work.send(rows)
        except StopIteration as done:
            self.counts = done.value
        except Exception as error:
            self.problem = _problem(error)


class WorkerSide:
    """The connector on one rank.

    Jobs go on from step to step: objects are read by threads, and a step copies and computes piece by piece while its
    time lasts, so that no request waits for the links of others. An exception, whatever it is, is the outcome of its
    jobs.

    Args:
        forward: of vLLM's model.
        model: the same model as policies see it, without its weights.
        budget: of a step that has work of its own.
    """

    def __init__(self, forward: RowForward, store: Store, model: Model, budget: StepBudget) -> None:
        self._forward, self._store, self._model, self._budget = forward, store, model, budget
        self._clock = DeviceClock(forward.model.device)
        self._pace, self._copy_size = StepTimeLimit(budget.step_s), PieceSize(FIRST_BYTES)
        self._throttle = BackgroundThrottle()
        self._threads = background_threads(THREADS, "pic-read")
        self._loading: dict[str, Loading] = {}  # by request id
        self._short: deque[_Computing] = deque()  # rows of static policies
        self._long: deque[_Computing] = deque()  # of those that narrow them, and of what is compiled
        self._turns = deque([self._short, self._long])
        self._later: deque[_Computing] = deque()  # of what is compiled and nobody waits for
        self._writing: dict[str, Future[None]] = {}

    def step(self, jobs: Sequence[Job], target: Target, is_idle: bool) -> dict[str, JobResult]:
        """Go on with the jobs of earlier steps and with these; returns the outcomes of those that ended.

        Every rank does the same. They agree on what is loaded and what failed before they compute rows, and on each
        piece of the computation.

        Args:
            is_idle: the step has no other work: nobody waits for its end.
        """
        deadline = self._pace.begin(is_idle)
        self._throttle.note(is_idle)
        outcomes = {job.request_id: JobResult(job.problem) for job in jobs if isinstance(job, FailedJob)}
        self._loading |= {job.request_id: self._start(job, target) for job in jobs if isinstance(job, LinkJob)}
        has_copied = self._copy(deadline.half() if self._short or self._long else deadline, is_idle)
        outcomes |= self._take_loaded()
        for job in jobs:
            if isinstance(job, CompileJob):
                queue = self._later if job.later else self._long
                queue.append(_Computing({job.request_id: JobResult()}, self._compile(job, target)))
        outcomes |= self._compute(deadline, has_copied, is_idle)
        outcomes |= self._take_written(deadline.left_s if is_idle else 0.0)
        self._pace.end(is_idle)
        return outcomes

    def shutdown(self) -> None:
        """Read no more."""
        for loading in self._loading.values():
            loading.close()
        self._threads.shutdown(wait=True)

    # Loading

    def _start(self, job: LinkJob, target: Target) -> Loading:
        model, target = self._forward.model, job.adapter.target if job.adapter else target
        reader = partial(ObjectReader, self._store, target, job, model.rank.heads, model.device, self._throttle.pause)
        checked = job.plan.policy.check_layers(len(model.layers)) if job.rows is None else ()
        return Loading(job, self._threads, reader, checked)

    def _copy(self, deadline: StepDeadline, is_idle: bool) -> bool:
        """Copy what was read, job by job in their order; returns whether anything was.

        A step that is idle, and has nothing to compute, waits for what is being read.
        """
        max_bytes = math.inf if is_idle else self._budget.max_bytes
        has_copied = False
        for loading in self._loading.values():
            while loading.loaded is None and loading.problem is None:
                if not loading.is_readable and is_idle and not (self._short or self._long or self._later):
                    loading.wait(max(0.0, deadline.left_s))
                if not loading.is_readable or max_bytes <= 0 or (has_copied and deadline.is_near):
                    break
                max_bytes -= self._copy_piece(loading, min(max_bytes, self._copy_size.within(deadline.left_s)))
                has_copied = True
        return has_copied

    def _copy_piece(self, loading: Loading, max_bytes: float) -> int:
        """Copy at most so many bytes of a layer; returns how many."""
        started = self._clock.now()
        try:
            num_bytes = loading.copy(self._forward.model, max_bytes)
        except Exception as error:
            loading.problem = _problem(error)
            return 0
        if num_bytes:
            self._copy_size.took(num_bytes, self._clock.now() - started)
        return num_bytes

    def _take_loaded(self) -> dict[str, JobResult]:
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
                outcome = JobResult(problem, load_s=loading.seconds)
                if problem is not None:
                    outcomes[name] = outcome
                else:
                    assert loading.loaded is not None
                    ready.append((outcome, loading.loaded))
        for is_narrowing, compute, queue in ((False, self._static, self._short), (True, self._narrowing, self._long)):
            alike: dict[int, list[tuple[JobResult, LoadedJob]]] = {}  # by adapter: a forward has one
            for outcome, entry in ready:
                if (entry.job.rows is None) is is_narrowing:
                    number = entry.job.adapter.request.lora_int_id if entry.job.adapter else 0
                    alike.setdefault(number, []).append((outcome, entry))
            for chosen in alike.values():
                before = {entry.job.request_id: outcome for outcome, entry in chosen}
                queue.append(_Computing(before, compute([entry for _, entry in chosen])))
        return outcomes

    # Computing

    def _compute(self, deadline: StepDeadline, has_copied: bool, is_idle: bool) -> dict[str, JobResult]:
        """Go on with what is being computed while there is time; returns the outcomes.

        The two queues take turns to be first, so that no long pass holds the short ones. What nobody waits for comes
        after them; in a step that has other work it gets one piece, if they get none, of a part of the time. The first
        rank decides how many rows the next piece has, and when the step has done enough.
        """
        rank, outcomes = self._forward.model.rank, dict[str, JobResult]()
        left, has_begun = self._budget.max_rows * len(self._forward.model.layers), has_copied
        self._turns.rotate()
        for queue in (*self._turns, self._later):
            yields = queue is self._later and not is_idle
            while queue:
                current = queue[0]
                is_enough = current.is_over or left <= 0 or (has_begun and (yields or deadline.is_near))
                left_s = deadline.left_s * (LATER_SHARE if yields else 1)
                rows = 0 if is_enough else min(left, current.next_rows(left_s))
                rows, has_failed = rank.follow_first(rows, current.problem is not None)
                if has_failed or current.is_over:
                    queue.popleft()
                    outcomes |= current.results()
                elif rows:
                    current.compute(rows, self._clock)
                    left, has_begun = left - rows, True
                else:
                    break
        agreed = rank.agree([outcome.problem for outcome in outcomes.values()], [True] * len(outcomes))
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
        yield from self._forward.run(PromptBatch.of_jobs(loaded), RowSet.of(masks), self._budget.max_rows)
        return [int(mask.sum()) for mask in masks]

    def _narrowing(self, loaded: Sequence[LoadedJob]) -> Work[Sequence[float]]:
        """Compute the rows of policies that narrow them, layer by layer."""
        return (yield from NarrowingForward(self._forward, self._model, loaded).run())

    # Compiling

    def _compile(self, job: CompileJob, target: Target) -> Work[Sequence[float]]:
        """Compute a chunk after its context, and hand its object to a thread that writes it; the first rank writes."""
        forward, rank, target = self._forward, self._forward.model.rank, job.adapter.target if job.adapter else target
        rows, capture = RowSet.of([np.ones(len(job.tokens), dtype=bool)]), KVCapture(forward.model)
        work = forward.run(PromptBatch.of([job.tokens], [job.blocks], job.adapter), rows, self._budget.max_rows)
        piece: ForwardPiece | None = next(work)
        while piece is not None:
            count = yield piece
            with capture.hooks():  # not between two pieces: there vLLM computes other requests
                piece = _send(work, count)
        layers = []
        for keys_and_values in zip(capture.keys, capture.values, strict=True):
            yield ForwardPiece("gather", 1)
            key, value = map(torch.cat, keys_and_values)
            joined = by_rotation(target.geometry, forward.model.as_stored(key), value)
            parts = (part.reshape(len(job.tokens), len(rank.heads), -1) for part in joined)
            layers.append([rank.gather_heads(part)[job.before :].transpose(0, 1).contiguous() for part in parts])
        computed = streams.event_now(forward.model.device)
        write = partial(self._write, job, target, layers, computed) if rank.is_first else lambda: None
        self._writing[job.request_id] = self._threads.submit(write)
        return [0.0]

    def _write(
        self, job: CompileJob, target: Target, layers: Sequence[Sequence[Tensor]], computed: torch.Event | None
    ) -> None:
        if computed is not None:  # this thread's stream is not the one that computes: vLLM's own is
            computed.synchronize()
        before, tokens = tuple(job.tokens[: job.before].tolist()), job.tokens[job.before :]
        after = (before,) if before else ()
        own = target.identify(tokens, CODEC, job.salt, after=after)
        meta = ObjectMeta(own.key, target, len(tokens), CODEC, salted=own.salted, after=after)
        data = [(to_bytes(key), to_bytes(value)) for key, value in layers]
        self._model.require_storable()
        own_target, adapter = self._model.target, job.adapter
        if target != (own_target if adapter is None else adapted(own_target, adapter.request.lora_path)):
            raise ModelError(f"{self._model.name}: the scheduler's weights differ from a worker's; start vLLM again")
        self._store.put(CompiledChunk(meta, job.text, tokens, data))

    def _take_written(self, wait_s: float) -> dict[str, JobResult]:
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
                outcomes[name] = JobResult(problem)
        return outcomes


def _send(work: Work[None], rows: int) -> ForwardPiece | None:
    """Let a forward go on; None at its end."""
    try:
        return work.send(rows)
    except StopIteration:
        return None


class KVCapture:
    """Un-rotated keys, and values, of a forward of one run by layer; one entry per piece, by position."""

    def __init__(self, model: WorkerModel) -> None:
        self._model, self._rotary_key = model, torch.empty(0)
        self.keys: list[list[Tensor]] = [[] for _ in model.layers]
        self.values: list[list[Tensor]] = [[] for _ in model.layers]

    @contextmanager
    def hooks(self) -> Iterator[KVCapture]:
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
            self.values[index].append(self._model.layers[index].keys_and_values(inputs)[1].clone())

        return keep


def _problem(error: BaseException) -> Problem:
    """What the client and the log are told; an exception that nobody expects is logged whole."""
    if not isinstance(error, PicError):
        _log.warning("pic: unexpected", exc_info=error)
    return Problem.of(error)
