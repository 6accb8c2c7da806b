"""How far the memory of a device, or of this process, rises while something runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """A context manager: afterwards `bytes` is the growth of the peak over what was in use at the start.

    Of the device's memory on CUDA, of this process's resident set on Linux; None where the system does not tell.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._start: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        self._start = _start_on_cuda(self._device) if self._device.startswith("cuda") else _start_of_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._start is not None:
            peak = _peak_on_cuda(self._device) if self._device.startswith("cuda") else _resident("VmHWM")
            self.bytes = max(0, peak - self._start)


def _start_on_cuda(device: str) -> int:
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_on_cuda(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated(device)


def _start_of_process() -> int | None:
    """The resident set, after the kernel has forgotten its peak; None where there is no such kernel."""
    try:
        _CLEAR.write_text("5")
        return _resident("VmRSS")
    except (OSError, LookupError):
        return None


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(field)
    return int(found[1]) * 1024
