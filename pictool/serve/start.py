"""Starting a backend: what is checked before the first request."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.engines import engine_of
from pictool.errors import InputError
from pictool.fidelity.divergence import measure_divergence
from pictool.fidelity.sample import read_sample
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.runtime.support import depends_on_length
from pictool.serve.backends.torch.backend import BackendSettings, TorchBackend
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.serve.backends.upstream.backend import UpstreamBackend


def start_backend(
    model: Model, store: Store, settings: BackendSettings, limit: float | None, refuses: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> TorchBackend:  # fmt: skip
    """Load the model, and check how far the policy's answers are from full recompute.

    Args:
        limit: KL(full ‖ linked) in nats above which the server falls back to exact answers; None: nothing is checked.
        refuses: above it, no server is started.
        warn: called with what the operator should know.

    Raises:
        InputError: the check failed, and `refuses`. PicError: the model cannot be loaded.
    """
    _ = model.stack, model.target, model.eos_ids
    if settings.pool_bytes is None and depends_on_length(model.config):
        warn(f"{model.name}: its RoPE depends on the prompt's length, so no KV is kept from request to request")
    backend = TorchBackend(model, store, settings)
    if limit is None or not settings.policy.needs.objects:
        return backend
    try:
        label, kl = label_of(settings.policy), check_linking(model, settings.policy, store.root)
        backend.divergence = {label: kl}
        if kl > limit:
            problem = (
                f"{label}: linked answers of {backend.model} are {kl:.3g} nats from full recompute, more than {limit:g}"
            )
            if refuses:
                raise InputError(f"{problem}; try another --algo, or a larger --check-limit")
            backend.policy, backend.problem = make_policy(BASELINE), problem
            warn(f"{problem}; requests that name no policy are answered exactly")
    except BaseException:
        backend.close()
        raise
    return backend


def check_linking(model: Model, policy: Policy, tuned: Path | None = None) -> float:
    """Link a few short prompts under a policy, and under full recompute: KL(full ‖ linked) in nats, the mean.

    Objects of the check are in a store of its own, which is removed.

    Args:
        tuned: the store whose prompts of `pic tune` are linked, if it has some; else they are about made-up places.

    Raises:
        InputError: the prompts cannot be linked.
    """
    with tempfile.TemporaryDirectory(prefix="pic-check-") as root:
        try:
            sample = [] if tuned is None else read_sample(tuned)
            (divergence,) = measure_divergence(engine_of(model)(model, Store(Path(root))), [policy], sample=sample)
        except InputError as error:
            raise InputError(f"the start-up check cannot run: {error}; turn it off with --check off") from error
    return divergence.mean_kl


def start_upstream(
    model: Model, store: Store, settings: BackendSettings, urls: Sequence[str], limit: float | None,
    refuses: bool = False, key: str | None = None, lives: Callable[[], bool] = lambda: True,
) -> UpstreamBackend:  # fmt: skip
    """The same on servers elsewhere. See `UpstreamBackend` for the other arguments, and `start` for what it raises."""
    from pictool.serve.backends.upstream.backend import UpstreamBackend

    backend = UpstreamBackend(model, store, settings, urls, key, lives)

    async def start() -> None:
        await backend.start(limit, refuses)
        await backend.disconnect()

    try:
        asyncio.run(start())
    except BaseException:
        backend.close()
        raise
    return backend
