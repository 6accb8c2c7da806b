"""Responses that may be named later, of each tenant within a budget and a lifetime. In memory: a restart loses them."""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 32 << 20  # in memory, of what a tenant's responses hold
LIFETIME_S = 86400.0
_OBJECTS_BYTES = 1024  # of a response's own objects: the dataclass, its tuples, its place in a table

Item = Mapping[str, Any]


@dataclass(eq=False)
class KeptResponse:
    """A response and the items of its request, as JSON, and the response that it follows.

    Attributes:
        num_holders: the responses that follow this one, and 1 while it can be named; 0: nothing of it is counted.
    """

    previous: KeptResponse | None
    expires: float
    _body: bytes  # without its output
    _given: tuple[KeptItem, ...]
    _output: tuple[KeptItem, ...]
    num_holders: int = 0
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = _OBJECTS_BYTES + sys.getsizeof(self._body) + sum(item.num_bytes for item in self.items())

    @property
    def body(self) -> dict[str, Any]:
        """The response."""
        return {**json.loads(self._body), "output": [item.value for item in self._output]}

    @property
    def given(self) -> list[dict[str, Any]]:
        """The items of its request."""
        return [item.value for item in self._given]

    @property
    def history(self) -> list[dict[str, Any]]:
        """All items up to its end: those of the responses before it, of its request, and its own."""
        return [item.value for turn in [*self.chain()][::-1] for item in turn.items()]

    def chain(self) -> Iterator[KeptResponse]:
        """This response, the one that it follows, and so on."""
        turn: KeptResponse | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    def items(self) -> tuple[KeptItem, ...]:
        """The items of the request, and those of the response."""
        return (*self._given, *self._output)


@dataclass(frozen=True)
class KeptItem:
    """An item, as JSON, and its id."""

    name: Any
    text: bytes

    @property
    def value(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def num_bytes(self) -> int:
        return _OBJECTS_BYTES // 4 + sys.getsizeof(self.name) + sys.getsizeof(self.text)


@dataclass
class _Tenant:
    """The responses of a tenant that can be named, the oldest first, and what these hold, each counted once."""

    named: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def hold(self, kept: KeptResponse) -> None:
        for turn in kept.chain():
            turn.num_holders += 1
            if turn.num_holders > 1:
                return
            self.num_bytes += turn.num_bytes

    def release(self, kept: KeptResponse) -> None:
        for turn in kept.chain():
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self.num_bytes -= turn.num_bytes


class KeptResponses:
    """The responses of all tenants; those that were kept first make room. May be called by several threads."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES, lifetime_s: float = LIFETIME_S) -> None:
        self._clock, self._max_bytes, self._lifetime_s = clock, max_bytes, lifetime_s
        self._tenants: dict[str, _Tenant] = {}
        self._lock = threading.Lock()

    def add(
        self, tenant: str, body: Mapping[str, Any], given: Sequence[Item], previous: KeptResponse | None = None
    ) -> None:
        """Keep a response, unless it and those that it follows are more than the budget.

        Args:
            given: the items of its request.
            previous: the response that it follows.
        """
        head, expires = _json({**body, "output": None}), self._clock() + self._lifetime_s
        kept = KeptResponse(previous, expires, head, _kept_items(given), _kept_items(body["output"]))
        if sum(turn.num_bytes for turn in kept.chain()) > self._max_bytes:
            return
        with self._lock:
            own = self._tenants.setdefault(tenant, _Tenant())
            own.named[body["id"]] = kept
            own.hold(kept)
            while own.num_bytes > self._max_bytes or next(iter(own.named.values())).expires <= self._clock():
                own.release(own.named.popitem(last=False)[1])

    def find(self, tenant: str, name: str) -> KeptResponse | None:
        """A response of a tenant that has not expired."""
        with self._lock:
            found = self._named(tenant).get(name)
        return found if found is not None and found.expires > self._clock() else None

    def items(self, tenant: str) -> dict[str, KeptItem]:
        """The items of a tenant's responses and of their requests, by their ids."""
        with self._lock:
            kept = [entry for entry in self._named(tenant).values() if entry.expires > self._clock()]
        return {item.name: item for entry in kept for item in entry.items()}

    def remove(self, tenant: str, name: str) -> bool:
        """Forget a response; False if there is none. Those that follow it have its items still."""
        is_there = self.find(tenant, name) is not None
        with self._lock:
            if kept := self._named(tenant).pop(name, None):
                self._tenants[tenant].release(kept)
        return is_there

    def num_bytes(self, tenant: str) -> int:
        """What the responses of a tenant hold in memory, those that they follow included."""
        with self._lock:
            return self._tenants.get(tenant, _Tenant()).num_bytes

    def _named(self, tenant: str) -> OrderedDict[str, KeptResponse]:
        return self._tenants.get(tenant, _Tenant()).named


def _kept_items(items: Sequence[Item]) -> tuple[KeptItem, ...]:
    return tuple(KeptItem(item.get("id"), _json(item)) for item in items)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
