"""The endpoint plugin `pictool` of vLLM's server (entry point group `vllm.endpoint_plugins`).

vLLM loads it where `VLLM_PLUGINS` names it. An exception while it is imported or made would only be logged, and the
server would start without it, keys and all; so nothing is imported before `attach_router`, whose errors end the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pictool.serve.backends.vllm.backend import VllmBackend
    from pictool.serve.backends.vllm.options import PluginOptions
    from pictool.serve.service import Service

on_ready: Callable[[str, str], None] | None = None  # receives the address and the policy, once the server listens
_POLL_S = 0.05


class PicEndpoints:
    """The routes of `pic serve` inside vLLM's server."""

    name = "pictool"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._options: PluginOptions | None = None
        self._backend: VllmBackend | None = None
        self._service: Service | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; those of the same path replace vLLM's own.

        Raises:
            InputError: a server without PicConnector, or with several processes for HTTP; fields that do not fit.
        """
        from prometheus_client import REGISTRY

        from pictool.errors import InputError
        from pictool.serve.backends.vllm.backend import VllmBackend
        from pictool.serve.backends.vllm.options import parse_options
        from pictool.serve.backends.vllm.router import attach
        from pictool.serve.service import Service, ServiceSettings, lease_share
        from pictool.serve.tenants import Keys, Tenant, read_keys

        args = app.state.args
        transfer = args.kv_transfer_config
        if transfer is None or transfer.kv_connector != "PicConnector":
            raise InputError("VLLM_PLUGINS: pictool's routes need PicConnector; see docs/guides/vllm.md")
        if (args.api_server_count or 1) > 1:
            raise InputError("--api-server-count: pictool's routes run in one process; leave it out")
        extra = transfer.kv_connector_extra_config
        self._options = parse_options(extra.get("serve"))
        keys = Keys(default=Tenant("default"))
        if self._options.keys is not None:
            keys = read_keys(Path(self._options.keys))
        self._backend = VllmBackend(self._options, len(keys.tenants))
        leased = self._options.leases or lease_share(extra.get("max_bytes"), keys)
        settings = ServiceSettings(self._options.ttl, lease_bytes=leased)
        self._service = Service(self._backend, Path(extra["store"]), keys, settings, registry=REGISTRY)
        attach(app, self._service, self._backend)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take over the engine, and check the loaded weights.

        Raises:
            InputError: linking fails the check, and `check` is refuse.
        """
        from pictool.engines.vllm.client.serving import Serving

        assert self._backend is not None and self._service is not None and self._options is not None
        await self._backend.start(Serving(engine_client, state))
        if self._options.check != "off":
            await self._backend.check(self._options.check_limit, self._options.check == "refuse")
        self._service.metrics.show_divergence()
        if on_ready is not None:
            self._announcing = asyncio.create_task(_announce(state, on_ready, self._backend.status().policy))


async def _announce(state: Any, tell: Callable[[str, str], None], policy: str) -> None:
    """Wait until the server listens, and say where."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(_POLL_S)
    address = state.server.servers[0].sockets[0].getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    tell(f"http://{host}:{address[1]}", policy)


def endpoint_plugin() -> PicEndpoints:
    """What the entry point names."""
    return PicEndpoints()
