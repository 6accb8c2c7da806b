"""The endpoint plugin `pictool` of vLLM's server (entry point group `vllm.endpoint_plugins`).

vLLM loads it where `VLLM_PLUGINS` names it. An exception while it is imported or made would only be logged, and the
server would start without it, keys and all; so nothing is imported before `attach_router`, whose errors end the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pictool.serve.service import Service
    from pictool.serve.vllm_home import VllmHome

on_ready: Callable[[str, str], None] | None = None  # receives the address and the policy, once the server listens
_POLL_S = 0.05
CHECKS = ("exact", "refuse", "off")


@dataclass(frozen=True)
class PluginOptions:
    """The field `serve` of `kv_connector_extra_config`.

    Fields:
        keys: file of bearer keys (`TENANT KEY SALT`); None: everybody is one tenant.
        ttl: seconds that caches last which name no time.
        check: what follows if linking fails the start-up check: exact, refuse; off: there is none.
        check_limit: the divergence from full recompute that it allows, in nats.
        queue: requests that wait at most, of all tenants. active: answers that vLLM is asked for at once; None: as many
            as it batches (`--max-num-seqs`).
        learn: bytes of objects that are compiled from texts which requests repeat, until the server ends.
    """

    keys: str | None = None
    ttl: float = 3600.0
    check: str = "exact"
    check_limit: float = 0.5
    queue: int = 256
    active: int | None = None
    learn: int = 0


def parse_options(value: Mapping[str, Any] | None) -> PluginOptions:
    """Parse the field `serve`.

    Raises:
        InputError: an unknown field, or a value that does not fit.
    """
    from pictool.errors import InputError

    kinds: dict[str, Any] = {
        "keys": (str, type(None)), "ttl": (int, float), "check": str, "check_limit": (int, float), "queue": int,
        "active": (int, type(None)), "learn": int,
    }  # fmt: skip
    given = dict(value or {})
    if unknown := sorted(set(given) - set(kinds)):
        raise InputError(f"kv_connector_extra_config: serve has no field {unknown[0]!r}; it has {', '.join(kinds)}")
    options = PluginOptions(**given)
    for field in fields(options):
        held = getattr(options, field.name)
        if not isinstance(held, kinds[field.name]) or isinstance(held, bool):
            raise InputError(f"kv_connector_extra_config: serve: {field.name}={held!r} has the wrong type")
    if options.check not in CHECKS:
        raise InputError(f"kv_connector_extra_config: serve: check must be one of {', '.join(CHECKS)}")
    if not (options.ttl >= 1 and options.check_limit >= 0):
        raise InputError("kv_connector_extra_config: serve: ttl must be 1 or more, check_limit 0 or more")
    if options.queue < 1 or options.learn < 0 or (options.active is not None and options.active < 1):
        raise InputError("kv_connector_extra_config: serve: queue and active must be 1 or more, learn 0 or more")
    return options


class PicEndpoints:
    """The routes of `pic serve` inside vLLM's server."""

    name = "pictool"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._options = PluginOptions()
        self._home: VllmHome | None = None
        self._service: Service | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; those of the same path replace vLLM's own.

        Raises:
            InputError: a server without PicConnector, or with several processes for HTTP; fields that do not fit.
        """
        from prometheus_client import REGISTRY

        from pictool.errors import InputError
        from pictool.serve.service import Service, ServiceSettings
        from pictool.serve.tenants import Keys, Tenant, read_keys
        from pictool.serve.vllm_home import VllmHome
        from pictool.serve.vllm_router import attach

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
        self._home = VllmHome(self._options)
        settings = ServiceSettings(default_ttl_s=self._options.ttl)
        self._service = Service(self._home, Path(extra["store"]), keys, settings, registry=REGISTRY)
        attach(app, self._service, self._home)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take over the engine, and check the loaded weights.

        Raises:
            InputError: linking fails the check, and `check` is refuse.
        """
        from pictool.engines.vllm.serving import Serving

        assert self._home is not None and self._service is not None
        await self._home.start(Serving(engine_client, state))
        if self._options.check != "off":
            await self._home.check(self._options.check_limit, self._options.check == "refuse")
        self._service.metrics.show_divergence()
        if on_ready is not None:
            self._announcing = asyncio.create_task(_announce(state, on_ready, self._home.status().policy))


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
