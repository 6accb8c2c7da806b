"""Host memory: a cache of layers that were read and checked before, and of KV that a device evicted, by content."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class LayerMemory:
    """Buffers of layers, at most `max_bytes` of them; the least recently used are evicted. Thread-safe.

    A buffer's key is the checksum of the layer that was read to it (with all that says how it was decoded), never a
    file's name: a file that is replaced or damaged later changes nothing. Nobody writes to a buffer in this cache. It
    can be of any kind that the caller allocates.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.hits = self.misses = 0
        self._buffers: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, content: Hashable, num_bytes: int, read: Callable[[], Any]) -> Any:
        """The buffer with this content; on a miss `read` returns it, checked. What `read` raises is raised.

        Threads that miss at the same time read the same bytes; one buffer stays.
        """
        with self._lock:
            if cached := self._buffers.get(content):
                self._buffers.move_to_end(content)
                self.hits += 1
                return cached[0]
            self.misses += 1
        buffer = read()
        with self._lock:
            self._insert(content, buffer, num_bytes)
        return buffer

    def put(self, content: Hashable, num_bytes: int, buffer: Any) -> None:
        """Keep a buffer."""
        with self._lock:
            self._insert(content, buffer, num_bytes)

    def has(self, content: Hashable) -> bool:
        """Whether there is a buffer with this content."""
        with self._lock:
            return content in self._buffers

    def _insert(self, content: Hashable, buffer: Any, num_bytes: int) -> None:
        if num_bytes > self.max_bytes or content in self._buffers:
            return
        while self.num_bytes + num_bytes > self.max_bytes:
            _, (_, freed) = self._buffers.popitem(last=False)
            self.num_bytes -= freed
        self._buffers[content] = buffer, num_bytes
        self.num_bytes += num_bytes
