"""Responses that may be named later, of each tenant within a budget and a lifetime. In memory: a restart loses them."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 32 << 20  # of the responses of a tenant, as JSON
LIFETIME_S = 86400.0

Item = Mapping[str, Any]


@dataclass(frozen=True)
class KeptResponse:
    """A response, the items that its request had, and all items up to its end, its own among them."""

    body: Mapping[str, Any]
    given: Sequence[Item]
    history: Sequence[Item]
    expires: float = 0.0
    num_bytes: int = 0


class KeptResponses:
    """The responses of all tenants; those that were kept first make room. May be called by several threads."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES, lifetime_s: float = LIFETIME_S) -> None:
        self._clock, self._max_bytes, self._lifetime_s = clock, max_bytes, lifetime_s
        self._by_tenant: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._lock = threading.Lock()

    def add(self, tenant: str, body: Mapping[str, Any], given: Sequence[Item], before: Sequence[Item]) -> None:
        """Keep a response. `before` are the items of those that precede its request."""
        num_bytes = len(json.dumps([body, given]))
        history = (*before, *given, *body["output"])
        kept = KeptResponse(body, given, history, self._clock() + self._lifetime_s, num_bytes)
        with self._lock:
            own = self._by_tenant.setdefault(tenant, OrderedDict())
            own[body["id"]] = kept
            total = sum(entry.num_bytes for entry in own.values())
            while total > self._max_bytes:
                total -= own.popitem(last=False)[1].num_bytes

    def find(self, tenant: str, name: str) -> KeptResponse | None:
        """A response of a tenant that has not expired."""
        with self._lock:
            found = self._by_tenant.get(tenant, OrderedDict()).get(name)
        return found if found is not None and found.expires > self._clock() else None

    def items(self, tenant: str) -> dict[str, Item]:
        """The items of a tenant's responses and of their requests, by their ids."""
        with self._lock:
            kept = [entry for entry in self._by_tenant.get(tenant, {}).values() if entry.expires > self._clock()]
        return {item["id"]: item for entry in kept for item in (*entry.given, *entry.body["output"])}

    def remove(self, tenant: str, name: str) -> bool:
        """Forget a response; False if there is none. Those that follow it have its items still."""
        is_there = self.find(tenant, name) is not None
        with self._lock:
            self._by_tenant.get(tenant, OrderedDict()).pop(name, None)
        return is_there
