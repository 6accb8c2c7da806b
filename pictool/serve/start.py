"""Starting a backend on the torch engine: what is checked before the first request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pictool.runtime.support import depends_on_length
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.check import check_linking, judge

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.serve.backends.upstream.backend import UpstreamBackend
    from pictool.store.store import Store


def start_backend(
    model: Model, store: Store, settings: BackendSettings, limit: float | None, refuses: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> TorchBackend:  # fmt: skip
    """Load the model, and check how far the policy's answers are from full recompute.

    Args:
        limit: share of blind reuse's KL above which the server falls back to exact answers; None: nothing is checked.
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
        with model.on_wait("comparing linked answers with exact ones (--check off skips this)"):
            found = check_linking(model, settings.policy, settings.after)
        judge(backend, found, limit, refuses, warn)
    except BaseException:
        backend.close()
        raise
    return backend


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
