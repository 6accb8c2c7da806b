"""Responses that may be named later, of each tenant within a budget and a lifetime. In memory: a restart loses them."""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 32 << 20  # in memory, of what a tenant's responses hold
LIFETIME_S = 86400.0
_OBJECTS_BYTES = 1536  # of a response's own objects: the dataclass, its ids, its place in a table

Item = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class KeptResponse:
    """A response and the items of its request, as JSON, and the response that it follows. `ids` are those of items."""

    previous: KeptResponse | None
    expires: float
    ids: frozenset[str]
    _text: bytes

    @property
    def num_bytes(self) -> int:
        return _OBJECTS_BYTES + sys.getsizeof(self._text)

    @property
    def body(self) -> dict[str, Any]:
        """The response."""
        body: dict[str, Any] = json.loads(self._text)["body"]
        return body

    @property
    def given(self) -> list[dict[str, Any]]:
        """The items of its request."""
        given: list[dict[str, Any]] = json.loads(self._text)["given"]
        return given

    @property
    def history(self) -> list[dict[str, Any]]:
        """All items up to its end: those of the responses before it, of its request, and its own."""
        return [item for turn in [*self.chain()][::-1] for item in (*turn.given, *turn.body["output"])]

    def chain(self) -> Iterator[KeptResponse]:
        """This response, the one that it follows, and so on."""
        turn: KeptResponse | None = self
        while turn is not None:
            yield turn
            turn = turn.previous


@dataclass
class _Tenant:
    """The responses of a tenant that can be named, the oldest first, and the bytes of these and those they follow."""

    named: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class KeptResponses:
    """The responses of all tenants; those that were kept first make room. May be called by several threads."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES, lifetime_s: float = LIFETIME_S) -> None:
        self._clock, self._max_bytes, self._lifetime_s = clock, max_bytes, lifetime_s
        self._tenants: dict[str, _Tenant] = {}
        self._lock = threading.RLock()

    def add(
        self, tenant: str, body: Mapping[str, Any], given: Sequence[Item], previous: KeptResponse | None = None
    ) -> None:
        """Keep a response, unless it and those that it follows are more than the budget.

        Args:
            given: the items of its request.
            previous: the response that it follows.
        """
        text = json.dumps({"body": body, "given": given}, ensure_ascii=False, separators=(",", ":"))
        ids = frozenset(item["id"] for item in (*given, *body["output"]) if "id" in item)
        expires = self._clock() + self._lifetime_s
        kept = KeptResponse(previous, expires, ids, text.encode(errors="surrogatepass"))
        if sum(turn.num_bytes for turn in kept.chain()) > self._max_bytes:
            return
        with self._lock:
            own = self._tenants.setdefault(tenant, _Tenant())
            own.named[body["id"]] = kept
            own.num_bytes += kept.num_bytes
            weakref.finalize(kept, self._release, own, kept.num_bytes)
            while own.named and (own.num_bytes > self._max_bytes or not self._is_alive(next(iter(own.named.values())))):
                own.named.popitem(last=False)

    def _release(self, own: _Tenant, num_bytes: int) -> None:
        """Count a response no more: it cannot be named, and none that follows it is there."""
        with self._lock:
            own.num_bytes -= num_bytes

    def find(self, tenant: str, name: str) -> KeptResponse | None:
        """A response of a tenant that has not expired."""
        with self._lock:
            kept = self._tenant(tenant).named.get(name)
        return kept if kept is not None and self._is_alive(kept) else None

    def item(self, tenant: str, name: str) -> dict[str, Any] | None:
        """An item of a tenant's responses or of their requests, by its id."""
        with self._lock:
            found = [kept for kept in self._tenant(tenant).named.values() if name in kept.ids and self._is_alive(kept)]
        items = [item for kept in found[:1] for item in (*kept.given, *kept.body["output"])]
        return next((item for item in items if item.get("id") == name), None)

    def remove(self, tenant: str, name: str) -> bool:
        """Forget a response; False if there is none. Those that follow it have its items still."""
        is_there = self.find(tenant, name) is not None
        with self._lock:
            self._tenant(tenant).named.pop(name, None)
        return is_there

    def num_bytes(self, tenant: str) -> int:
        """What the responses of a tenant hold in memory, those that they follow included."""
        return self._tenant(tenant).num_bytes

    def _is_alive(self, kept: KeptResponse) -> bool:
        return kept.expires > self._clock()

    def _tenant(self, tenant: str) -> _Tenant:
        return self._tenants.get(tenant, _Tenant())
