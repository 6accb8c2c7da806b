"""The scheduler's side: plans requests, keeps linked blocks apart by salts, and turns failures into exact requests."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pictool.core import RowMask
from pictool.engines.vllm.client.setup import ConnectorSettings
from pictool.engines.vllm.messages import Adapter, CompileJob, FailedJob, Job, JobResult, LinkJob
from pictool.engines.vllm.request import (
    FIELD,
    SALT_PREFIX,
    CompileParams,
    LinkParams,
    PlanningDeadline,
    Problem,
    ReportParams,
    is_proof,
    parse_request,
)
from pictool.engines.vllm.scheduler.planning import Planner
from pictool.errors import ModelError, PicError
from pictool.linker.grid import label_of
from pictool.linker.plan import LinkPlan
from pictool.linker.policies.base import Selection

if TYPE_CHECKING:
    from vllm.v1.request import Request

PLAN_WAIT_S = 0.002  # how long a scheduling step waits for plans, those of requests that arrive before it among them
_OF_THE_SCHEDULER = ("kv_transfer_params", "ec_transfer_params")  # fields that have whatever a client nested
_MANY = 64  # objects that a request names: it is planned in threads of its own kind, and delays no other one
_THREADS, _THREADS_FOR_MANY = 4, 1
_NAMED = 4096  # reports that are kept for who asks for them by name
_log = logging.getLogger("vllm.pictool")


@dataclass
class LinkReport:
    """What a request's response says under `kv_transfer_params["pic"]`."""

    policy: str
    chunks: int = 0
    context: int = 0
    state: str = "waiting"  # then linked, cached, compiled, or exact
    shared: int | None = None  # tokens of the context whose blocks vLLM had of an equal link
    recomputed: float | None = None
    document_tokens: int = 0  # of the prompt, that objects of documents have
    document_rows: float = 0.0  # of these, computed again: the mean over the layers
    documents: list[tuple[int, int, str, int | None]] = field(default_factory=list)  # start, end, key, such rows of it
    timing: dict[str, float] = field(default_factory=dict)
    problem: str | None = None


@dataclass
class MetricCounts:
    """What is counted between two readings of the metrics."""

    linked: int = 0
    failed: int = 0
    reused_tokens: float = 0.0
    shared_tokens: int = 0
    recomputed_tokens: float = 0.0
    load_s: list[float] = field(default_factory=list)  # of every link
    recompute_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class PromptPlan:
    """A plan, and its rows; None: the policy narrows them, from what it selects `first`."""

    plan: LinkPlan
    rows: RowMask | None
    first: Selection | None
    planner: Planner


@dataclass
class _Link:
    """A request that is being linked. `own_salt` is the one under which its blocks are, if it is computed exactly."""

    request: Request
    client_salt: str = field(repr=False)
    own_salt: str | None = field(repr=False)
    planning: Future[PromptPlan | None]
    deadline: PlanningDeadline | None  # until when it must be planned
    report: LinkReport
    started: float
    is_fresh: bool = False  # nothing of it comes from vLLM's own cache
    planned: PromptPlan | None = None  # once it has the salt of its plan
    num_external: int = 0  # tokens that its job loads or computes
    is_loaded: bool = False


@dataclass
class _Compile:
    """A request that is being compiled. `salt` is what the client sent; `checking` ends when its prompt was checked."""

    request: Request
    parsed: CompileParams
    report: LinkReport
    salt: str = field(repr=False)
    checking: Future[Planner]
    deadline: PlanningDeadline


class SchedulerSide:
    """The connector in the scheduler's process.

    Requests are planned in threads: whatever clients ask for, no step of the scheduler waits for all of it longer than
    `PLAN_WAIT_S`, and one after a step that had other work not at all. An exception, whatever it is, makes its request
    an ordinary one, and so does a plan that is not made in time.
    """

    def __init__(self, planner: Planner, settings: ConnectorSettings) -> None:
        self._planner, self._settings = planner, settings
        self._planners: dict[int, Planner] = {}  # by the id of an adapter
        self._making = threading.Lock()
        self._salts, self._counts = SaltFactory(), MetricCounts()
        self._active: dict[str, _Link | _Compile] = {}  # by request id
        self._reports: dict[str, LinkReport] = {}  # of requests that are neither any more
        self._named: dict[str, LinkReport] = {}  # by the name that a request gave its own
        self._jobs: list[Job] = []
        self._declined: str | None = None  # why the workers link nothing
        self._threads = ThreadPoolExecutor(_THREADS, "pic-plan")
        self._threads_for_many = ThreadPoolExecutor(_THREADS_FOR_MANY, "pic-plan-many")
        self._throttle = planner.throttle
        self._patience_s = PLAN_WAIT_S  # that is left of this step's

    def add_request(self, request: Request) -> None:
        """Begin to plan a new request. A plan that is made at once has its salt before vLLM looks for its blocks."""
        client_salt, parsed = request.cache_salt or "", None
        try:
            if client_salt:  # vLLM's KV events show it, and it finds a tenant's objects
                _set_salt(request, self._salts.salt_of_client(client_salt))
            params = request.kv_transfer_params
            if not isinstance(params, Mapping):  # vLLM itself reads from what is true
                request.kv_transfer_params = None
            _keep_from_workers(request)
            settings = self._settings
            parsed = parse_request(params, settings.policy, settings.recognise, settings.codec)
            if parsed is None:
                return
            if isinstance(parsed, ReportParams):
                unknown = LinkReport(label_of(settings.policy), state="unknown")
                self._reports[request.request_id] = self._named.pop(parsed.name, unknown)
                return
            salt = client_salt if parsed.salt is None else parsed.salt
            if problem := self._declined or _unlinkable(request):
                self._refuse(request, parsed, problem)
            elif isinstance(parsed, CompileParams):
                self._add_compile(request, parsed, salt)
            else:
                self._add_link(request, parsed, salt)
        except Exception as error:
            self._fall_back(request, error)
        if isinstance(parsed, LinkParams | CompileParams) and parsed.report_as:
            self._name_report(request.request_id, parsed.report_as)

    def _name_report(self, request_id: str, name: str) -> None:
        """Keep the report of a request for who asks for it by its name, the last `_NAMED` of them.

        Of several answers to one prompt it is the first one's: the others reuse what that has linked, or wait for it.
        """
        active = self._active.get(request_id)
        report = self._reports.get(request_id) if active is None else active.report
        if report is not None:
            self._named.setdefault(name, report)
        if len(self._named) > _NAMED:
            del self._named[next(iter(self._named))]

    def num_matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Tokens to load after the computed ones; None: not known yet, ask again. Never blocks the scheduler."""
        try:
            active = self._active.get(request.request_id)
            if isinstance(active, _Compile):
                return self._num_to_compile(active, num_computed)
            return 0 if active is None else self._num_to_link(active, num_computed)
        except Exception as error:
            self._fall_back(request, error)
            return None  # its blocks must be looked for again

    def take_blocks(self, request: Request, blocks: Sequence[int], num_external: int) -> None:
        """Blocks were allocated; with `num_external` tokens to load, the job goes out with this step."""
        link = self._active.get(request.request_id)
        if isinstance(link, _Link) and link.planned is not None and link.report.shared is None:
            link.report.shared = link.planned.plan.num_context - num_external
            self._counts.shared_tokens += link.report.shared
        if not num_external:
            return
        try:
            self._jobs.append(self._make_job(request, blocks, num_external))
        except Exception as error:  # vLLM waits for an outcome from here on
            self._jobs.append(FailedJob(request.request_id, Problem.of(error)))

    def take_jobs(self, num_tokens: int = 0) -> list[Job]:
        """The jobs of a step that computes so many tokens beside. If it computes any, the next waits for no plan."""
        self._throttle.note(not num_tokens)
        self._patience_s = 0.0 if num_tokens else PLAN_WAIT_S
        jobs, self._jobs = self._jobs, []
        return jobs

    def finish_jobs(self, outcomes: dict[str, JobResult], declined: Problem | None = None) -> None:
        """Record outcomes. A request whose job failed is an ordinary one from here on: vLLM computes all of it.

        Args:
            declined: why workers link nothing; then no request is planned any more.
        """
        self._declined = None if declined is None else declined.shown
        for name, outcome in outcomes.items():
            active = self._active.get(name)
            if active is None:  # it was aborted
                continue
            if outcome.problem is not None:
                self._fall_back(active.request, outcome.problem)
            elif isinstance(active, _Link):
                self._finish_link(active, outcome)
            else:
                active.report.state = "compiled"
                active.checking.result().wake()
                self._reports[name] = self._active.pop(name).report

    def finish_request(self, request: Request) -> dict[str, Any] | None:
        """A request is over: the fields that its response gets."""
        name = request.request_id
        report = self._drop(name) or self._reports.pop(name, None)
        return None if report is None else {FIELD: dict(vars(report))}

    def take_counts(self) -> MetricCounts | None:
        """What was counted since the last call; None if nothing."""
        counts, self._counts = self._counts, MetricCounts()
        return counts if counts != MetricCounts() else None

    def shutdown(self) -> None:
        for threads in (self._threads, self._threads_for_many):
            threads.shutdown(wait=False, cancel_futures=True)
        for planner in (self._planner, *self._planners.values()):
            planner.close()

    def _planner_of(self, request: Request) -> Planner:
        """In a thread: the planner of the request's adapter, which may have to be read. Raises InputError."""
        adapter = request.lora_request
        if adapter is None:
            return self._planner
        with self._making:
            if adapter.lora_int_id not in self._planners:
                self._planners[adapter.lora_int_id] = self._planner.under(adapter.lora_path)
            planner = self._planners[adapter.lora_int_id]
        planner.require_unchanged()
        return planner

    def _add_link(self, request: Request, parsed: LinkParams, client_salt: str) -> None:
        tokens = request.prompt_token_ids or []
        deadline = PlanningDeadline.after(self._settings.plan_s)
        threads = self._threads_for_many if len(parsed.objects or ()) > _MANY else self._threads
        report, own_salt = LinkReport(label_of(parsed.policy)), request.cache_salt
        planning = threads.submit(self._plan, request, parsed, tokens, client_salt, deadline)
        limit = None if parsed.policy.needs.runs_model else deadline  # a second model takes the time that it takes
        link = _Link(request, client_salt, own_salt, planning, limit, report, time.perf_counter())
        link.is_fresh = parsed.fresh
        self._active[request.request_id] = link
        if self._is_done(planning):
            self._take_plan(link)

    def _is_done(self, future: Future[Any], deadline: PlanningDeadline | None = None) -> bool:
        """Whether a future has ended, or ends while this step has patience.

        Raises:
            RequestError: it has not, and its deadline is over.
        """
        started = time.monotonic()
        is_done = bool(wait([future], self._patience_s).done)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - started))
        if not is_done and deadline is not None:
            deadline.check()
        return is_done

    def _plan(
        self,
        request: Request,
        parsed: LinkParams,
        tokens: Sequence[int],
        salt: str,
        deadline: PlanningDeadline,
    ) -> PromptPlan | None:
        """In a thread: the plan and its rows; None if nothing was recognised."""
        planner = self._planner_of(request)
        plan = planner.plan(parsed, np.asarray(tokens, dtype=np.int32), salt, deadline)
        if plan is None:
            return None
        rows = planner.select(plan)
        return PromptPlan(plan, rows, planner.first_selection(plan) if rows is None else None, planner)

    def _take_plan(self, link: _Link) -> None:
        """The plan is there, or failed: give the request the salt of the plan, or make it an ordinary one."""
        planned = link.planning.result()
        if planned is None:  # nothing was recognised
            self._drop(link.request.request_id)
            return
        plan, report = planned.plan, link.report
        report.chunks, report.context = sum(span.key is not None for span in plan.spans[1:]), plan.num_context
        _count_documents(report, planned)
        report.timing["select_s"] = time.perf_counter() - link.started
        salt, before = self._salts.salt_of(plan, link.client_salt), list(link.request.block_hashes)
        _set_salt(link.request, self._salts.unique() if link.is_fresh else salt)
        if before and link.request.block_hashes == before:  # an ordinary request would be answered from linked blocks
            raise ModelError("vLLM's block hashes do not depend on the salt of a request")
        link.planned = planned

    def _num_to_link(self, link: _Link, num_computed: int) -> int | None:
        if link.planned is None:
            if not self._is_done(link.planning, link.deadline):
                return None
            self._take_plan(link)
            return None if link.planned else 0  # blocks must be looked for again, under the salt of the plan
        plan, report = link.planned.plan, link.report
        if num_computed >= plan.num_context:
            report.state = "cached" if report.state == "waiting" else report.state
            return 0
        if num_computed and link.planned.rows is None:  # a policy that narrows needs the whole prompt
            _set_salt(link.request, self._salts.unique())
            return None
        return plan.num_context - num_computed

    def _num_to_compile(self, job: _Compile, num_computed: int) -> int | None:
        if not self._is_done(job.checking, job.deadline):
            return None
        job.checking.result()
        return int(job.request.num_prompt_tokens) - 1 - num_computed

    def _make_job(self, request: Request, blocks: Sequence[int], num_external: int) -> Job:
        name = request.request_id
        active = self._active[name]
        if isinstance(active, _Compile):
            parsed, adapter = active.parsed, _adapter_of(request, active.checking.result())
            tokens = np.asarray(request.prompt_token_ids[:-1], dtype=np.int32)
            return CompileJob(
                name, tokens, parsed.before, parsed.text, tuple(blocks), active.salt, parsed.later, adapter
            )  # fmt: skip
        planned = active.planned
        assert planned is not None
        active.num_external, computed = num_external, planned.plan.num_context - num_external
        adapter = _adapter_of(request, planned.planner)
        return LinkJob(name, planned.plan, planned.rows, computed, tuple(blocks), planned.first, adapter)

    def _add_compile(self, request: Request, parsed: CompileParams, salt: str) -> None:
        before = request.prompt_token_ids[: parsed.before]
        is_proven = is_proof(parsed.proof, parsed.text, before, salt)
        if not self._settings.compile and not is_proven:
            self._refuse(request, parsed, 'compile: disabled on this server (kv_connector_extra_config "compile")')
            return
        checking = self._threads.submit(self._check_compile, request, parsed, is_proven)
        report = LinkReport(label_of(parsed.policy))
        deadline = PlanningDeadline.after(self._settings.plan_s)
        self._active[request.request_id] = _Compile(request, parsed, report, salt, checking, deadline)
        _set_salt(request, self._salts.unique())

    def _check_compile(self, request: Request, parsed: CompileParams, is_proven: bool) -> Planner:
        """In a thread: the planner of a request that can be compiled. Raises InputError."""
        self._planner.require_compilable(request.prompt_token_ids or [], parsed, is_proven)
        return self._planner_of(request)

    def _finish_link(self, link: _Link, outcome: JobResult) -> None:
        report, reused = link.report, link.num_external - outcome.recomputed
        report.state, report.recomputed = "linked", outcome.recomputed
        assert link.planned is not None
        if link.planned.rows is None:  # the policy narrowed them
            required = int(link.planned.plan.required.sum())
            report.document_rows = min(max(0.0, outcome.recomputed - required), report.document_tokens)
        report.timing |= {"load_s": outcome.load_s, "recompute_s": outcome.recompute_s}
        if link.is_loaded:  # again, after it was preempted
            return
        link.is_loaded = True
        self._counts.linked += 1
        self._counts.recomputed_tokens += outcome.recomputed
        self._counts.reused_tokens += reused
        self._counts.load_s.append(outcome.load_s)
        self._counts.recompute_s.append(outcome.recompute_s)
        stats = link.request.prefill_stats
        if stats is not None:  # what was computed for the link is no cached token
            stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, math.floor(reused))

    def _fall_back(self, request: Request, why: Problem | Exception) -> None:
        """From here on the request is an ordinary one, with the block hashes of one."""
        problem = why if isinstance(why, Problem) else Problem.of(why)
        name, active = request.request_id, self._active.get(request.request_id)
        if isinstance(active, _Link):
            if active.planned is not None:
                active.planned.planner.mark_suspect(active.planned.plan)
            _set_salt(request, active.own_salt)
        if isinstance(why, Exception) and not isinstance(why, PicError):
            _log.warning("pic: unexpected", exc_info=why)
        self._fail(name, self._drop(name) or LinkReport(label_of(self._settings.policy)), problem)

    def _drop(self, name: str) -> LinkReport | None:
        """Forget a request that is linked or compiled; returns its report."""
        active = self._active.pop(name, None)
        if isinstance(active, _Link):
            active.planning.cancel()
        return None if active is None else active.report

    def _refuse(self, request: Request, parsed: LinkParams | CompileParams, problem: str) -> None:
        """A request that cannot be linked. It has failed only if it names objects."""
        if isinstance(parsed, CompileParams) or parsed.objects is not None:
            self._fail(request.request_id, LinkReport(label_of(parsed.policy)), Problem(problem, problem))
        else:
            self._reports[request.request_id] = LinkReport(label_of(parsed.policy), state="exact", problem=problem)

    def _fail(self, name: str, report: LinkReport, problem: Problem) -> None:
        """The request is computed exactly: report it, count it, and warn."""
        report.state, report.problem, report.recomputed = "exact", problem.shown, None
        self._reports[name] = report
        self._counts.failed += 1
        _log.warning("pic: request %s is computed exactly: %s", name, problem.detail)


def _count_documents(report: LinkReport, planned: PromptPlan) -> None:
    """Count the tokens of documents in a prompt, and those of them that are computed again, if that is known."""
    documents = [span for span in planned.plan.spans[1:] if span.key is not None]
    report.document_tokens = sum(span.end - span.start for span in documents)
    for span in documents:
        rows = None if planned.rows is None else int(planned.rows[span.start : span.end].sum())
        report.documents.append((span.start, span.end, str(span.key), rows))
    if planned.rows is not None:
        report.document_rows = float(sum(planned.rows[span.start : span.end].sum() for span in documents))


class SaltFactory:
    """Makes the salts by which vLLM's prefix cache finds linked blocks only for requests that link the same way.

    A secret of this process is in them, so that no client can name one.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)

    def salt_of(self, plan: LinkPlan, own_salt: str | None) -> str:
        """The salt of a plan: its policy with fields, its spans and their objects, and the request's own salt."""
        spans = [(span.start, span.end, span.key, span.offset) for span in plan.spans]
        return self._salt([own_salt, plan.policy.name, plan.policy.params, spans])

    def salt_of_client(self, salt: str) -> str:
        """What a client's salt becomes: that which vLLM's KV events show opens nothing, here or elsewhere."""
        return self._salt(["client", salt])

    def unique(self) -> str:
        """A salt that no other request has."""
        return self._salt(secrets.token_hex(16))

    def _salt(self, value: object) -> str:
        return SALT_PREFIX + hashlib.sha256(json.dumps([self._secret, value], sort_keys=True).encode()).hexdigest()


def _set_salt(request: Request, salt: str | None) -> None:
    """Give a request another salt, and the block hashes that follow from it."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _keep_from_workers(request: Request) -> None:
    """Leave out of what vLLM pickles for the workers what only the scheduler reads: pickling ends at some depth."""
    sampling = request.sampling_params
    if sampling is not None and sampling.extra_args:
        request.sampling_params = copy(sampling)
        request.sampling_params.extra_args = {
            name: value for name, value in sampling.extra_args.items() if name not in _OF_THE_SCHEDULER
        }


def _adapter_of(request: Request, planner: Planner) -> Adapter | None:
    """The adapter of a request, and the target of its planner; None for the base model."""
    return None if request.lora_request is None else Adapter(request.lora_request, planner.target)


def _unlinkable(request: Request) -> str | None:
    """Why a request cannot be linked, or None."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "a prompt of embeddings has no tokens to link"
    if request.sampling_params is None:
        return "pooling requests are not linked"
    if request.mm_features or request.resumable:
        return "requests with media or streamed input are not linked"
    if request.lora_request is not None and request.lora_request.load_inplace:
        return "requests with an adapter reloaded in place (load_inplace) are not linked"
    if request.skip_reading_prefix_cache:
        return "log-probabilities of the prompt (or skip_reading_prefix_cache) need the whole prompt to be computed"
    return None
