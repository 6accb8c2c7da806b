"""The start-up check: how far linked answers of the loaded weights are from those of full recompute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from pictool.engines import engine_of
from pictool.errors import InputError
from pictool.fidelity.divergence import measure_divergence
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.serve.work import Backend
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def check_linking(model: Model, policy: Policy) -> float:
    """Link a few short prompts under a policy, and under full recompute; returns the mean KL(full ‖ linked) in nats.

    Objects of the check are in a store of its own, which is removed.

    Raises:
        InputError: the prompts cannot be linked.
    """
    with tempfile.TemporaryDirectory(prefix="pic-check-") as root:
        try:
            (divergence,) = measure_divergence(engine_of(model)(model, Store(root)), [policy])
        except InputError as error:
            raise InputError(f"the start-up check cannot run: {error}; turn it off with --check off") from error
    return divergence.mean_kl


def judge(backend: Backend, kl: float, limit: float, refuses: bool, warn: Callable[[str], None]) -> None:
    """Have a backend answer exactly if the check's KL is above the limit. Raises InputError if it `refuses` instead."""
    label = label_of(backend.policy)
    backend.divergence = {label: kl}
    if kl <= limit:
        return
    problem = f"{label}: linked answers of {backend.model} are {kl:.3g} nats from full recompute, more than {limit:g}"
    if refuses:
        raise InputError(f"{problem}; try another --algo, or a larger --check-limit")
    backend.policy, backend.problem = make_policy(BASELINE), problem
    warn(f"{problem}; requests that name no policy are answered exactly")
