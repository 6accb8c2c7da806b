"""The scheduler's side: what a request links, salts that keep its blocks apart, failures that become exact requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pictool.core import RowMask
from pictool.engines.vllm.messages import CompileJob, Counts, LinkJob, Outcome, Report
from pictool.engines.vllm.plan import LinkPlan
from pictool.engines.vllm.planner import Planner
from pictool.engines.vllm.salt import Salter
from pictool.engines.vllm.wanted import Compile, Wanted, parse_wanted
from pictool.errors import PicError
from pictool.linker.grid import label_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

Rows = Future[RowMask | None]
_PATIENCE_S = 0.001  # the scheduler waits so long for a selection before it looks after other requests
_log = logging.getLogger("vllm.pictool")


@dataclass
class _Linking:
    """A request that is, or was to be, linked."""

    request: Request
    own_salt: str | None
    plan: LinkPlan
    rows: Rows
    report: Report
    started: float
    is_done: bool = False  # nothing (more) is to be loaded


@dataclass
class _Compiling:
    request: Request
    what: Compile
    report: Report
    salt: str


class SchedulerSide:
    """Everything that the connector does in the scheduler's process."""

    def __init__(self, planner: Planner, may_compile: bool) -> None:
        self._planner, self._may_compile = planner, may_compile
        self._salter, self._counts = Salter(), Counts()
        self._linking: dict[str, _Linking] = {}
        self._compiling: dict[str, _Compiling] = {}
        self._exact: dict[str, Report] = {}
        self._jobs: list[LinkJob | CompileJob] = []
        self._threads = ThreadPoolExecutor(1, "pic-select")

    def add(self, request: Request) -> None:
        """A new request: plan it, and give it a salt of its own, before anything looks for its blocks."""
        settings = self._planner.settings
        try:
            wanted = parse_wanted(request.kv_transfer_params, settings.policy, settings.recognise)
            if wanted is None:
                return
            if reason := _unlinkable(request):
                self._refuse(request, wanted, reason)
            elif wanted.compile is not None:
                self._add_compile(request, wanted)
            else:
                self._add_link(request, wanted)
        except PicError as error:
            self._exact[request.request_id] = self._failed(request, Report(label_of(settings.policy)), str(error))

    def num_matched(self, request: Request, computed: int) -> int | None:
        """Tokens to be linked behind the `computed` ones; None: ask again. Loads never block the scheduler."""
        if request.request_id in self._compiling:
            return int(request.num_prompt_tokens) - 1 - computed
        one = self._linking.get(request.request_id)
        if one is None or (one.is_done and computed >= one.plan.reach):
            return 0
        if not self._is_selected(one):
            return None
        if request.request_id not in self._linking:  # selecting failed: its blocks must be looked for again
            return None
        if computed >= one.plan.reach:
            one.report.state = "cached" if one.report.state == "waiting" else one.report.state
            return 0
        if computed and one.rows.result() is None:  # what narrows looks at the whole prompt
            self._salt(request, self._salter.unique())
            return None
        return one.plan.reach - computed

    def take_blocks(self, request: Request, blocks: Sequence[int], num_external: int) -> None:
        """Blocks were allocated; with `num_external` tokens to load, the job goes out with this step."""
        if not num_external:
            return
        name = request.request_id
        if name in self._compiling:
            what = self._compiling[name].what
            tokens = np.asarray(request.prompt_token_ids[:-1], dtype=np.int32)
            self._jobs.append(
                CompileJob(name, tokens, what.sinks, what.text, tuple(blocks), self._compiling[name].salt)
            )
            return
        one = self._linking[name]
        computed = one.plan.reach - num_external
        self._jobs.append(LinkJob(name, one.plan, one.rows.result(), computed, tuple(blocks)))

    def take_jobs(self) -> list[LinkJob | CompileJob]:
        """The jobs of this step."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def close(self, outcomes: dict[str, Outcome]) -> None:
        """What became of jobs. A request that failed goes on as an ordinary one; vLLM computes it from the start."""
        for name, outcome in outcomes.items():
            if name in self._linking:
                self._close_link(self._linking[name], outcome)
            elif name in self._compiling:
                report = self._compiling.pop(name).report
                report.state = "compiled" if outcome.problem is None else "exact"
                self._exact[name] = report
                if outcome.problem is not None:
                    self._count_failure(name, report, outcome.problem)

    def finish(self, request: Request) -> dict[str, Any] | None:
        """A request is over: what its response says."""
        name = request.request_id
        found = self._linking.pop(name, None) or self._compiling.pop(name, None)
        report = found.report if found is not None else self._exact.pop(name, None)
        return None if report is None else {"pic": report.as_dict()}

    def take_counts(self) -> Counts | None:
        """What was counted since the last look; None if nothing."""
        counts, self._counts = self._counts, Counts()
        return counts if counts != Counts() else None

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._planner.close()

    def _add_link(self, request: Request, wanted: Wanted) -> None:
        started = time.perf_counter()
        tokens = np.asarray(request.prompt_token_ids, dtype=np.int32)
        plan = self._planner.plan(wanted, tokens, request.cache_salt or "")
        if plan is None:  # nothing was recognised
            return
        rows: Rows = Future()
        if plan.policy.is_slow:
            rows = self._threads.submit(self._planner.select, plan)
        else:
            rows.set_result(self._planner.select(plan))
        report = Report(label_of(plan.policy), sum(span.key is not None for span in plan.spans[1:]), plan.reach)
        self._linking[request.request_id] = _Linking(request, request.cache_salt, plan, rows, report, started)
        told = rows.result() if plan.policy.uses_tables else None
        self._salt(request, self._salter.of(plan, request.cache_salt, told))

    def _add_compile(self, request: Request, wanted: Wanted) -> None:
        assert wanted.compile is not None
        if not self._may_compile:
            self._refuse(request, wanted, 'compile: this server takes no objects (kv_connector_extra_config "compile")')
            return
        self._planner.require_compilable(request.prompt_token_ids or [], wanted.compile)
        report, salt = Report(label_of(wanted.policy)), request.cache_salt or ""
        self._compiling[request.request_id] = _Compiling(request, wanted.compile, report, salt)
        self._salt(request, self._salter.unique())

    def _is_selected(self, one: _Linking) -> bool:
        """Whether the rows are known. If choosing them failed, the request becomes an ordinary one."""
        try:
            one.rows.result(_PATIENCE_S)
        except TimeoutError:
            return False
        except (PicError, OSError, RuntimeError) as error:
            self._give_up(one, str(error))
        if not one.report.timing:
            one.report.timing["select_s"] = time.perf_counter() - one.started
        return True

    def _close_link(self, one: _Linking, outcome: Outcome) -> None:
        if outcome.problem is not None:
            self._give_up(one, outcome.problem)
            return
        report = one.report
        one.is_done, report.state, report.recomputed = True, "linked", outcome.recomputed
        report.timing |= {"load_s": outcome.load_s, "recompute_s": outcome.recompute_s}
        self._counts.linked += 1
        self._counts.recomputed_tokens += outcome.recomputed
        self._counts.reused_tokens += one.plan.reach - outcome.recomputed

    def _give_up(self, one: _Linking, problem: str) -> None:
        """From here on the request is an ordinary one, with the hashes of one."""
        name = one.request.request_id
        del self._linking[name]
        self._exact[name] = one.report
        self._salt(one.request, one.own_salt)
        self._count_failure(name, one.report, problem)
        self._planner.forget(one.plan)

    def _refuse(self, request: Request, wanted: Wanted, reason: str) -> None:
        """A request that cannot be linked: told only to those who asked for it."""
        if wanted.places is not None:
            report = Report(label_of(wanted.policy))
            self._exact[request.request_id] = self._failed(request, report, reason)

    def _failed(self, request: Request, report: Report, problem: str) -> Report:
        self._count_failure(request.request_id, report, problem)
        return report

    def _count_failure(self, name: str, report: Report, problem: str) -> None:
        report.state, report.problem, report.recomputed = "exact", problem, None
        self._counts.failed += 1
        _log.warning("pic: request %s is computed exactly: %s", name, problem)

    def _salt(self, request: Request, salt: str | None) -> None:
        """Give a request another salt, and the block hashes that follow from it."""
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()


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
