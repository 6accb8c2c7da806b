"""The start-up check: how far linked answers of the loaded weights are from those of full recompute."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.engines import engine_of
from pictool.errors import InputError
from pictool.fidelity.divergence import measure_divergence
from pictool.fidelity.sample import read_sample
from pictool.linker.policies.base import Policy
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def check_linking(model: Model, policy: Policy, tuned: Path | None = None) -> float:
    """KL(full ‖ linked) of the first token in nats, the mean over a few short prompts, by which a policy is judged.

    Objects of the check are in a store of its own, which is removed.

    Args:
        tuned: the store whose prompts of `pic tune` are linked, if it has some; else they are about made-up places.

    Raises:
        InputError: the prompts cannot be linked.
    """
    with tempfile.TemporaryDirectory(prefix="pic-check-") as root:
        try:
            sample = [] if tuned is None else read_sample(tuned)
            (divergence,) = measure_divergence(engine_of(model)(model, Store(root)), [policy], sample=sample)
        except InputError as error:
            raise InputError(f"the start-up check cannot run: {error}; turn it off with --check off") from error
    return divergence.mean_kl
