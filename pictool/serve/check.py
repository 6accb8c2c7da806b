"""The start-up check: how far linked answers of the loaded weights are from those of full recompute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from pictool.compiler.contexts import PREVIOUS
from pictool.engines import engine_of
from pictool.errors import InputError
from pictool.fidelity.divergence import Divergence, measure_divergence
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.serve.work import Backend
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def check_linking(model: Model, policy: Policy, after: str = PREVIOUS) -> Divergence:
    """Answer a few short prompts under a policy, over documents that are compiled after `after`, and in full.

    Objects of the check are in a store of its own, which is removed.

    Raises:
        InputError: the prompts cannot be linked.
    """
    with tempfile.TemporaryDirectory(prefix="pic-check-") as root:
        try:
            (divergence,) = measure_divergence(engine_of(model)(model, Store(root)), [policy], after)
        except InputError as error:
            raise InputError(f"the start-up check cannot run: {error}; turn it off with --check off") from error
    return divergence


def judge(backend: Backend, found: Divergence, limit: float, refuses: bool, warn: Callable[[str], None]) -> None:
    """Have a backend answer exactly if the check's divergence is too far for a limit on its share. Raises InputError if
    it `refuses` instead.
    """
    label = label_of(backend.policy)
    backend.divergence = {label: found.nats}
    if not found.is_far(limit):
        return
    problem = f"{label}: linked answers of {backend.model} are far from full recompute: {found} (limit {limit:.0%})"
    if refuses:
        raise InputError(f"{problem}; try another --algo, or a larger --check-limit")
    backend.policy, backend.problem = make_policy(BASELINE), problem
    warn(f"{problem}; requests without a policy are answered exactly")
