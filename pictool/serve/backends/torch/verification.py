"""Verification of the answers that a guarantee chose, by full recompute, while no request waits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pictool.engines.base import answer_kl
from pictool.fidelity.guarantee import Guarantor, Ticket
from pictool.linker.link import link
from pictool.linker.plan import LinkPlan, plan_without_objects
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.serve.backends.torch.engine_thread import ClosedError, EngineTask, EngineThread, QueueFullError
from pictool.serve.work import AnswerRequest

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.store import Store

FULL = make_policy(BASELINE)
_log = logging.getLogger("pictool.serve")


@dataclass(frozen=True)
class ChosenAnswer:
    """An answer that waits to be verified, of at most `limit` tokens. `plan` links its prompt, whatever answered it."""

    ticket: Ticket
    work: AnswerRequest
    plan: LinkPlan
    model: Model
    limit: int


class Verifier:
    """The chosen answers, which are verified one after the other in the thread that computes."""

    def __init__(self, guarantor: Guarantor, thread: EngineThread, store: Store) -> None:
        self._guarantor, self._thread, self._store = guarantor, thread, store
        self._chosen = deque[ChosenAnswer]()

    def add(self, chosen: ChosenAnswer) -> None:
        self._chosen.append(chosen)

    def verify_next(self) -> None:
        """Have the answer verified that has waited longest, if no request waits."""
        if self._thread.num_waiting:
            return
        with suppress(IndexError):
            chosen = self._chosen.popleft()
            measure: Callable[[EngineTask], None] = partial(self._measure, chosen)
            try:
                self._thread.submit(EngineTask(chosen.work.tenant.name, measure, partial(self._end, chosen)))
            except (QueueFullError, ClosedError):
                self._chosen.appendleft(chosen)

    def _measure(self, chosen: ChosenAnswer, task: EngineTask) -> None:
        """Link the prompt again, and take the KL over full's answer."""
        model, work, tokens = chosen.model, chosen.work, chosen.plan.layout.tokens
        full = link(model, self._store, Spec.planned(plan_without_objects(FULL, tokens)))
        task.checkpoint(ends_turn=True)
        exact = generate(
            model, full.image, chosen.limit, work.sampling, lambda _: task.checkpoint(), work.answer_format
        )
        task.checkpoint(ends_turn=True)
        linked = link(model, self._store, Spec.planned(chosen.plan))
        self._guarantor.verify(chosen.ticket, answer_kl(full.image, linked.image, exact.tokens))

    def _end(self, chosen: ChosenAnswer, error: BaseException | None) -> None:
        """One that lost its place waits again; one that cannot be verified counts as the worst."""
        if isinstance(error, QueueFullError):
            self._chosen.append(chosen)
        elif error is not None and not isinstance(error, ClosedError):
            _log.warning("pic: an answer cannot be verified, and counts as wrong: %s", error)
            self._guarantor.verify(chosen.ticket, None)
        if not isinstance(error, ClosedError | QueueFullError):
            self.verify_next()
