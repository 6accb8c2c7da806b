"""Host memory: a cache of layers that were read and checked before, and of KV that a device evicted, by content."""

from __future__ import annotations

from pictool.lru import Lru


class LayerMemory(Lru):
    """Buffers of layers.

    A buffer's key is the checksum of the layer that was read to it (with all that says how it was decoded), never a
    file's name: a file that is replaced or damaged later changes nothing. Nobody writes to a buffer in this cache. It
    can be of any kind that the caller allocates.
    """
