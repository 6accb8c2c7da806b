"""The field `serve` of `kv_connector_extra_config`: how the router inside vLLM's server works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pictool.errors import InputError

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
        leases: bytes of objects that the caches of one tenant hold at most; None: its part of the store's budget.
        separator: what prompts have between documents; None: what the model has.
    """

    keys: str | None = None
    ttl: float = 3600.0
    check: str = "exact"
    check_limit: float = 0.5
    queue: int = 256
    active: int | None = None
    learn: int = 0
    leases: int | None = None
    separator: str | None = None


def parse_options(value: Mapping[str, Any] | None) -> PluginOptions:
    """Parse the field `serve`.

    Raises:
        InputError: an unknown field, or a value that does not fit.
    """
    kinds: dict[str, Any] = {
        "keys": (str, type(None)), "ttl": (int, float), "check": str, "check_limit": (int, float), "queue": int,
        "active": (int, type(None)), "learn": int, "leases": (int, type(None)),
        "separator": (str, type(None)),
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
    if (
        options.queue < 1
        or options.learn < 0
        or any(value is not None and value < 1 for value in (options.active, options.leases))
    ):
        raise InputError("kv_connector_extra_config: serve: queue, active, leases must be 1 or more, learn 0 or more")
    return options
