"""`PicConnector`, the class that vLLM loads: it forwards vLLM's calls to the scheduler's or the worker's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.engines.vllm.client.setup import make_setup
from pictool.engines.vllm.needs import require_connector

require_connector()  # before anything is imported that a version may not have

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pictool.core import Target
from pictool.engines.vllm.messages import Job, JobResult
from pictool.engines.vllm.metrics import PicPromMetrics, PicStats
from pictool.engines.vllm.request import Problem
from pictool.engines.vllm.scheduler.planning import Planner
from pictool.engines.vllm.scheduler.scheduler import SchedulerSide
from pictool.engines.vllm.worker.check import make_forward
from pictool.engines.vllm.worker.forward import RowForward
from pictool.engines.vllm.worker.kv import TensorParallelRank, WorkerModel, find_worker, withhold_generators
from pictool.engines.vllm.worker.worker import StepBudget, WorkerSide
from pictool.errors import InputError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def __getattr__(name: str) -> Any:
    """vLLM looks for the connector by its name here, also for one that an option of its own put in this one's place.

    Raises:
        InputError: names the option.
    """
    if name.endswith("Connector"):
        raise InputError(f"--kv-offloading-size replaces PicConnector by {name}; omit it")
    raise AttributeError(name)


@dataclass
class PicMetadata(KVConnectorMetadata):
    """The jobs of a step. `target` is what their objects must be made for; an idle step has no other work."""

    target: Target
    jobs: list[Job]
    is_idle: bool


@dataclass
class PicWorkerMetadata(KVConnectorWorkerMetadata):
    """The outcomes of jobs by request id: one that failed on any rank has failed; and why nothing is linked, if so."""

    outcomes: dict[str, JobResult]
    declined: Problem | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, PicWorkerMetadata)
        failed = {name: outcome for name, outcome in other.outcomes.items() if outcome.problem is not None}
        return PicWorkerMetadata({**other.outcomes, **self.outcomes, **failed}, self.declined or other.declined)


class PicConnector(KVConnectorBase_V1):
    """Links prompts from object files. vLLM sees loads that are asynchronous: no running step waits for them."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, **_: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._setup = make_setup(vllm_config, kv_cache_config)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._declined: Problem | None = None  # why no request is linked
        self._outcomes: dict[str, JobResult] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._setup.require_fingerprint()
            settings = self._setup.settings
            self._scheduler_side = SchedulerSide(Planner(settings, self._setup.store, self._setup.model), settings)
        else:
            self._worker = find_worker()
            self._rewinds_on_cpu = self._worker.device.type == "cpu" and not self._worker.use_v2_model_runner

    # In the scheduler's process

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None
        return self._scheduler_side

    def on_new_request(self, request: Request) -> None:
        self._scheduler.add_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._scheduler.num_matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return ()  # vLLM zeroes the blocks as ever: a part of the last one stays unwritten

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.take_blocks(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        return PicMetadata(self._setup.target, self._scheduler.take_jobs(num_tokens), is_idle=not num_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, PicWorkerMetadata):
            self._scheduler.finish_jobs(meta.outcomes, meta.declined)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finish_request(request)

    # On every worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        setup, rank = self._setup, TensorParallelRank(self._setup.model.geometry.parts[0].heads)
        if rank.is_first:  # it writes objects
            setup.require_fingerprint()
        runner = self._worker.model_runner
        module, config, settings = self._worker.get_model(), setup.config, setup.settings
        forward = make_forward(
            lambda: RowForward(WorkerModel(module, config, setup.kv_cache_config, rank, runner)),
            config.model_config.max_model_len,
        )
        ((self._declined, _),) = rank.agree([forward if isinstance(forward, Problem) else None], [True])
        if isinstance(forward, RowForward):
            budget = StepBudget(settings.step_bytes, settings.step_rows or forward.max_rows, settings.step_ms / 1e3)
            self._worker_side = WorkerSide(forward, setup.store, setup.model, budget)

    def start_load_kv(self, forward_context: ForwardContext, **_: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, PicMetadata)
        if self._declined is not None:
            self._outcomes |= {job.request_id: JobResult(self._declined) for job in meta.jobs}
        else:
            assert self._worker_side is not None  # else a job without KV would count as done
            self._outcomes |= self._worker_side.step(meta.jobs, meta.target, meta.is_idle)
        if self._rewinds_on_cpu:
            withhold_generators(self._worker)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed = {name for name, outcome in self._outcomes.items() if outcome.problem is not None}
        return KVConnectorTransferResults(finished_recving=set(self._outcomes), failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        outcomes, self._outcomes = self._outcomes, {}
        return PicWorkerMetadata(outcomes, self._declined) if outcomes else None

    # In both

    def shutdown(self) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.shutdown()
        if self._worker_side is not None:
            self._worker_side.shutdown()

    def get_kv_connector_stats(self) -> PicStats | None:
        counts = self._scheduler_side.take_counts() if self._scheduler_side is not None else None
        return None if counts is None else PicStats(dict(vars(counts)))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PicStats:
        return PicStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PicPromMetrics:
        return PicPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
