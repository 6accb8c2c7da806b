"""A cache that is bounded by the size of what it holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Lru:
    """Values by their content, of `max_bytes` together; the least recently used are evicted. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.hits = self.misses = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, content: Hashable, num_bytes: int, read: Callable[[], Any]) -> Any:
        """The value of this content; on a miss `read` returns it. What `read` raises is raised.

        Threads that miss at the same time read the same; one value stays.
        """
        with self._lock:
            if cached := self._values.get(content):
                self._values.move_to_end(content)
                self.hits += 1
                return cached[0]
            self.misses += 1
        value = read()
        with self._lock:
            self._insert(content, value, num_bytes)
        return value

    def held(self, contents: Sequence[Hashable]) -> list[Any]:
        """The values of these contents; None for those that are not here."""
        found = list[Any]()
        with self._lock:
            for content in contents:
                cached = self._values.get(content)
                if cached is not None:
                    self._values.move_to_end(content)
                    self.hits += 1
                found.append(cached and cached[0])
        return found

    def put(self, content: Hashable, num_bytes: int, value: Any) -> None:
        """Keep a value."""
        with self._lock:
            self._insert(content, value, num_bytes)

    def has(self, content: Hashable) -> bool:
        """Whether there is a value of this content."""
        with self._lock:
            return content in self._values

    def _insert(self, content: Hashable, value: Any, num_bytes: int) -> None:
        if num_bytes > self.max_bytes or content in self._values:
            return
        while self.num_bytes + num_bytes > self.max_bytes:
            _, (_, freed) = self._values.popitem(last=False)
            self.num_bytes -= freed
        self._values[content] = value, num_bytes
        self.num_bytes += num_bytes
