"""How fast objects are written, read and verified, against what the disk, memory and the checksum do by themselves.

Objects of random bytes go through the store as compiled ones do. In the same round plain files of as many bytes are
written and read, and memory is copied and checksummed in pieces of a layer's size:

| of objects | own rate |
|---|---|
| `write`: put, with fsync of file and directory | `disk_write`: a plain file and fsync |
| `read_cold`: opened, then read and checked layer by layer, as the loader does | `disk_cold` or `disk_direct` |
| `read_warm`: the same from the page cache | `copy`: memory to a buffer of a layer's size |
| `verify`: everything read and checked, warm | `checksum`: BLAKE3 over memory |

The disk's own reading is that past the page cache (`disk_direct`) where that is possible and faster.

An object is checksummed whenever it is written or read. `expected` is the rate that follows from the parts: transfer
and checksum one after the other; a cold read is read ahead by the system meanwhile, so it takes the longer of disk and
processor. Cold is as far as this system can forget; what a controller or a host below it holds cannot be dropped.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pictool.bench.disk import workplace
from pictool.bench.storage_round import ObjectSize, Round, run_round
from pictool.errors import InputError

MEMORY_BYTES = 1 << 28  # beyond a processor's caches
OWN = {"write": "disk_write", "read_cold": "disk_cold", "read_warm": "copy", "verify": "checksum"}


@dataclass(frozen=True)
class StorageResult:
    """What one size measured: seconds of each round over all objects, by operation.

    `file_bytes` is one object file; `is_cold` says whether the page cache forgot when it was asked to (None: unknown).
    """

    size: ObjectSize
    file_bytes: int
    is_cold: bool | None
    seconds: Mapping[str, Sequence[float]]

    def rates(self, name: str) -> list[float]:
        """GB of K and V (10^9 bytes) per second in every round."""
        return [self.size.count * self.size.kv_bytes / seconds / 1e9 for seconds in self.seconds[name]]

    def own_rates(self, name: str) -> list[float]:
        """Those of what an operation is compared with."""
        rates = self.rates(OWN[name])
        if name == "read_cold" and "disk_direct" in self.seconds:
            return [max(pair) for pair in zip(rates, self.rates("disk_direct"), strict=True)]
        return rates

    def expected(self, name: str) -> list[float]:
        """Those that follow from the disk's, memory's and the checksum's."""
        moving = self.rates("disk_write" if name == "write" else "copy")
        rates = [1 / (1 / one + 1 / hashing) for one, hashing in zip(moving, self.rates("checksum"), strict=True)]
        if name == "read_cold":
            return [min(pair) for pair in zip(rates, self.own_rates(name), strict=True)]
        return rates

    def share(self, name: str, of: Sequence[float]) -> float:
        """The median of the rounds' ratios: what ran side by side is compared."""
        return statistics.median(mine / other for mine, other in zip(self.rates(name), of, strict=True))

    def report(self) -> dict[str, Any]:
        size = self.size
        return {
            "tokens": size.tokens, "objects": size.count, "geometry": vars(size.geometry), "dtype": size.dtype,
            "kv_bytes": size.kv_bytes, "file_bytes": self.file_bytes, "is_cold": self.is_cold,
            "operations": {name: self._operation(name) for name in OWN},
            "median_gb_s": {name: statistics.median(self.rates(name)) for name in self.seconds},
            "raw_s": {name: list(seconds) for name, seconds in self.seconds.items()},
        }  # fmt: skip

    def _operation(self, name: str) -> dict[str, Any]:
        rates, own, expected = self.rates(name), self.own_rates(name), self.expected(name)
        return {
            "gb_s": statistics.median(rates), "gb_s_range": [min(rates), max(rates)],
            "own": OWN[name], "own_gb_s": statistics.median(own), "of_own": self.share(name, own),
            "expected_gb_s": statistics.median(expected), "of_expected": self.share(name, expected),
        }  # fmt: skip


def measure_storage(
    sizes: Sequence[ObjectSize], where: str | Path = ".", repeats: int = 5, seed: int = 0,
    on_step: Callable[[], None] = lambda: None, memory_bytes: int = MEMORY_BYTES,
) -> list[StorageResult]:  # fmt: skip
    """Measure in a directory inside `where`, in rounds over all sizes, each beginning with another one.

    Args:
        on_step: called after each size of each round.
        memory_bytes: how much memory is copied and checksummed, round and round.

    Raises:
        InputError: no room, or no such directory.
    """
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: must be 1 or more")
    memory = np.full(max(memory_bytes, *(size.layer_bytes for size in sizes)), 7, dtype=np.uint8)
    rounds: dict[ObjectSize, list[Round]] = {size: [] for size in sizes}
    with workplace(where, max(map(bytes_needed, sizes))) as inside:
        for number in range(repeats):
            first = number % len(sizes)
            for size in [*sizes[first:], *sizes[:first]]:
                with tempfile.TemporaryDirectory(dir=inside) as root:
                    rounds[size].append(run_round(size, Path(root), memory, seed, number))
                on_step()
    return [_result(size, done) for size, done in rounds.items()]


def bytes_needed(size: ObjectSize) -> int:
    """On the disk: the objects, and plain files beside them."""
    header = 4096 + size.geometry.layers * 512 + 4 * size.tokens
    return size.count * (2 * size.kv_bytes + header)


def _result(size: ObjectSize, rounds: Sequence[Round]) -> StorageResult:
    seconds = {name: [one.seconds[name] for one in rounds] for name in rounds[0].seconds}
    colds = [one.is_cold for one in rounds]
    return StorageResult(size, rounds[0].file_bytes, None if None in colds else all(colds), seconds)
