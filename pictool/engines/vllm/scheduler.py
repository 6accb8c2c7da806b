"""The scheduler's side: plans requests, keeps linked blocks apart by salts, and turns failures into exact requests."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pictool.core import RowMask
from pictool.engines.vllm.messages import CompileJob, LinkJob, Outcome
from pictool.engines.vllm.planning import LinkPlan, Planner
from pictool.engines.vllm.request import FIELD, CompileRequest, LinkRequest, parse_request
from pictool.engines.vllm.setup import Settings
from pictool.errors import PicError
from pictool.linker.grid import label_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SELECT_WAIT_S = 0.001  # how long a scheduling step waits for rows that are being selected
_log = logging.getLogger("vllm.pictool")


@dataclass
class Report:
    """What a request's response says under `kv_transfer_params["pic"]`."""

    policy: str
    chunks: int = 0
    context: int = 0
    state: str = "waiting"  # then linked, cached, compiled, or exact
    recomputed: float | None = None
    timing: dict[str, float] = field(default_factory=dict)
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Counts:
    """What is counted between two readings of the metrics."""

    linked: int = 0
    failed: int = 0
    reused_tokens: float = 0.0
    recomputed_tokens: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass
class _Link:
    """A request that is being linked. `own_salt` is what the client sent."""

    request: Request
    own_salt: str | None = field(repr=False)
    plan: LinkPlan
    rows: Future[RowMask | None]
    report: Report
    started: float
    is_loaded: bool = False


@dataclass
class _Compile:
    """A request that is being compiled. `salt` is what the client sent."""

    parsed: CompileRequest
    report: Report
    salt: str = field(repr=False)


class SchedulerSide:
    """The connector in the scheduler's process."""

    def __init__(self, planner: Planner, settings: Settings) -> None:
        self._planner, self._settings = planner, settings
        self._salter, self._counts = Salter(), Counts()
        self._links: dict[str, _Link] = {}  # by request id
        self._compiles: dict[str, _Compile] = {}
        self._reports: dict[str, Report] = {}  # of requests that are neither any more
        self._jobs: list[LinkJob | CompileJob] = []
        self._threads = ThreadPoolExecutor(1, "pic-select")

    def add_request(self, request: Request) -> None:
        """Plan a new request and give it a salt, before the scheduler looks for its blocks in the prefix cache."""
        settings = self._settings
        try:
            parsed = parse_request(request.kv_transfer_params, settings.policy, settings.recognise)
            if parsed is None:
                return
            if problem := _unlinkable(request):
                self._refuse(request, parsed, problem)
            elif isinstance(parsed, CompileRequest):
                self._add_compile(request, parsed)
            else:
                self._add_link(request, parsed)
        except Exception as error:  # of whatever kind: it must end neither the engine nor the requests of others
            self._fail(request.request_id, Report(label_of(settings.policy)), _problem_of(error))

    def num_matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Tokens to load after the computed ones; None: not known yet, ask again. Never blocks the scheduler."""
        if request.request_id in self._compiles:
            return int(request.num_prompt_tokens) - 1 - num_computed
        link = self._links.get(request.request_id)
        if link is None or (link.is_loaded and num_computed >= link.plan.num_context):
            return 0
        if not self._is_selected(link):
            return None
        if request.request_id not in self._links:  # selecting failed: its blocks must be looked for again
            return None
        if num_computed >= link.plan.num_context:
            link.report.state = "cached" if link.report.state == "waiting" else link.report.state
            return 0
        if num_computed and link.rows.result() is None:  # a policy that narrows needs the whole prompt
            _set_salt(request, self._salter.unique())
            return None
        return link.plan.num_context - num_computed

    def take_blocks(self, request: Request, blocks: Sequence[int], num_external: int) -> None:
        """Blocks were allocated; with `num_external` tokens to load, the job goes out with this step."""
        if not num_external:
            return
        name = request.request_id
        if name in self._compiles:
            parsed, salt = self._compiles[name].parsed, self._compiles[name].salt
            tokens = np.asarray(request.prompt_token_ids[:-1], dtype=np.int32)
            self._jobs.append(CompileJob(name, tokens, parsed.sinks, parsed.text, tuple(blocks), salt))
            return
        link = self._links[name]
        computed = link.plan.num_context - num_external
        self._jobs.append(LinkJob(name, link.plan, link.rows.result(), computed, tuple(blocks)))

    def take_jobs(self) -> list[LinkJob | CompileJob]:
        """The jobs of this step."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def finish_jobs(self, outcomes: dict[str, Outcome]) -> None:
        """Record outcomes. A request whose job failed is an ordinary one from here on: vLLM computes all of it."""
        for name, outcome in outcomes.items():
            if name in self._links:
                self._finish_link(self._links[name], outcome)
            elif name in self._compiles:
                report = self._compiles.pop(name).report
                report.state = "compiled"
                self._reports[name] = report
                if outcome.problem is not None:
                    self._fail(name, report, outcome.problem)

    def finish_request(self, request: Request) -> dict[str, Any] | None:
        """A request is over: the fields that its response gets."""
        name = request.request_id
        active = self._links.pop(name, None) or self._compiles.pop(name, None)
        report = active.report if active is not None else self._reports.pop(name, None)
        return None if report is None else {FIELD: report.as_dict()}

    def take_counts(self) -> Counts | None:
        """What was counted since the last call; None if nothing."""
        counts, self._counts = self._counts, Counts()
        return counts if counts != Counts() else None

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._planner.close()

    def _add_link(self, request: Request, parsed: LinkRequest) -> None:
        started = time.perf_counter()
        tokens = np.asarray(request.prompt_token_ids, dtype=np.int32)
        plan = self._planner.plan(parsed, tokens, request.cache_salt or "")
        if plan is None:  # nothing was recognised
            return
        needs = plan.policy.needs
        rows: Future[RowMask | None] = Future()
        if needs.runs_model:
            rows = self._threads.submit(self._planner.select, plan)
        else:
            rows.set_result(self._planner.select(plan))
        chunks = sum(span.key is not None for span in plan.spans[1:])
        report = Report(label_of(plan.policy), chunks, plan.num_context)
        self._links[request.request_id] = _Link(request, request.cache_salt, plan, rows, report, started)
        table_rows = rows.result() if needs.tables else None
        _set_salt(request, self._salter.salt_of(plan, request.cache_salt, table_rows))

    def _add_compile(self, request: Request, parsed: CompileRequest) -> None:
        if not self._settings.compile:
            self._refuse(request, parsed, 'compile: this server takes no objects (kv_connector_extra_config "compile")')
            return
        self._planner.require_compilable(request.prompt_token_ids or [], parsed)
        self._compiles[request.request_id] = _Compile(parsed, Report(label_of(parsed.policy)), request.cache_salt or "")
        _set_salt(request, self._salter.unique())

    def _is_selected(self, link: _Link) -> bool:
        """Whether the rows are known. If selecting them failed, the request becomes an ordinary one."""
        try:
            link.rows.result(_SELECT_WAIT_S)
        except TimeoutError:
            return False
        except Exception as error:  # as in `add_request`
            self._fall_back(link, _problem_of(error))
        if not link.report.timing:
            link.report.timing["select_s"] = time.perf_counter() - link.started
        return True

    def _finish_link(self, link: _Link, outcome: Outcome) -> None:
        if outcome.problem is not None:
            self._fall_back(link, outcome.problem)
            return
        report = link.report
        link.is_loaded, report.state, report.recomputed = True, "linked", outcome.recomputed
        report.timing |= {"load_s": outcome.load_s, "recompute_s": outcome.recompute_s}
        self._counts.linked += 1
        self._counts.recomputed_tokens += outcome.recomputed
        self._counts.reused_tokens += link.plan.num_context - outcome.recomputed

    def _fall_back(self, link: _Link, problem: str) -> None:
        """From here on the request is an ordinary one, with the block hashes of one."""
        del self._links[link.request.request_id]
        _set_salt(link.request, link.own_salt)
        self._fail(link.request.request_id, link.report, problem)
        self._planner.doubt(link.plan)

    def _refuse(self, request: Request, parsed: LinkRequest | CompileRequest, problem: str) -> None:
        """A request that cannot be linked. Only one that names objects gets a report."""
        if isinstance(parsed, CompileRequest) or parsed.objects is not None:
            self._fail(request.request_id, Report(label_of(parsed.policy)), problem)

    def _fail(self, name: str, report: Report, problem: str) -> None:
        """The request is computed exactly: report it, count it, and warn."""
        report.state, report.problem, report.recomputed = "exact", problem, None
        self._reports[name] = report
        self._counts.failed += 1
        _log.warning("pic: request %s is computed exactly: %s", name, problem)


class Salter:
    """Makes the salts by which vLLM's prefix cache finds linked blocks only for requests that link the same way.

    A secret of this process is in them, so that no client can name one.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)

    def salt_of(self, plan: LinkPlan, own_salt: str | None, rows: RowMask | None = None) -> str:
        """The salt of a plan: its policy with fields, its spans and their objects, and the request's own salt.

        `rows` are the selected ones, if the policy reads tables: an object's key does not tell which table it has.
        """
        spans = [(span.start, span.end, span.key, span.offset) for span in plan.spans]
        rows_digest = None if rows is None else hashlib.sha256(rows.tobytes()).hexdigest()
        return self._salt([own_salt, plan.policy.name, plan.policy.params, spans, rows_digest])

    def unique(self) -> str:
        """A salt that no other request has."""
        return self._salt(secrets.token_hex(16))

    def _salt(self, value: object) -> str:
        return "pic:" + hashlib.sha256(json.dumps([self._secret, value], sort_keys=True).encode()).hexdigest()


def _set_salt(request: Request, salt: str | None) -> None:
    """Give a request another salt, and the block hashes that follow from it."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _problem_of(error: Exception) -> str:
    """What a response says of an error. One that nobody foresaw is described in the log."""
    if isinstance(error, PicError):
        return str(error)
    _log.error("pic: an error that should not occur; please report it", exc_info=error)
    return f"internal error ({type(error).__name__}), see the server's log"


def _unlinkable(request: Request) -> str | None:
    """Why a request cannot be linked, or None."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "a prompt of embeddings has no tokens to link"
    if request.sampling_params is None:
        return "a pooling request is not linked"
    if request.mm_features or request.lora_request is not None or request.resumable:
        return "requests with media, adapters or streamed input are not linked"
    if request.skip_reading_prefix_cache:
        return "log-probabilities of the prompt (or skip_reading_prefix_cache) need the whole prompt computed"
    return None
