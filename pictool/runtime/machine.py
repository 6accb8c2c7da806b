"""What measurements need of the system: a description of the machine, and how far memory rises while something runs."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from pictool.errors import ModelError
from pictool.runtime.device import accelerator, device_memory_bytes, device_name, has_streams, is_accelerator

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # as a container sees its own
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def machine() -> dict[str, Any]:
    """All that speed depends on (processor, memory, GPU, threads, versions), and nothing that names machine or user.

    None where the system does not say.
    """
    import torch

    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "gpu": gpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: installed(name) for name in ("transformers", "pictool")},
    }


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int | None:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def memory_bytes() -> int | None:
    """The machine's memory, or what its container may take of it, if that is less."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    with suppress(OSError, ValueError):  # ValueError: "max"
        return min(whole, int(_CONTAINER_LIMIT.read_text()))
    return whole


def require_memory(needed: int, name: str, dtype: str, device: str) -> None:
    """Refuse weights that the memory of a device does not hold, before any is taken.

    Args:
        needed: bytes of all weights. name: of the model.

    Raises:
        ModelError: both sizes, and the remedy.
    """
    has = device_memory_bytes(device) if is_accelerator(device) else memory_bytes()
    if has is None or needed <= has:
        return
    smaller = "--dtype bfloat16, " if dtype == "float32" else ""
    raise ModelError(
        f"{name}: in {dtype} its weights take {needed / 1e9:.1f} GB, but {device} has {has / 1e9:.1f} GB of memory; "
        f"use {smaller}a GGUF file of the model (-m FILE.gguf), a smaller model, or another --device"
    )


def gpu_name() -> str | None:
    kind = accelerator()
    return device_name(kind) if kind else None


def installed(name: str) -> str | None:
    """The version of a package; None if it runs from its sources."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def torch_version() -> str | None:
    """The version of torch with its build, as `torch.__version__`, without an import of torch; None if there is none.

    The metadata of a package from PyPI lacks the build.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = ['\"](.+)['\"]$", source, re.MULTILINE)
    return found[1] if found else installed("torch")


class PeakMemory:
    """A context manager: afterwards `bytes` is the growth of the peak over what was in use at the start.

    Of the device's memory on an accelerator, else of this process's resident set on Linux; None where the system does
    not say.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._start: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        self._start = _start_on(self._device) if has_streams(self._device) else _start_of_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._start is not None:
            peak = _peak_on(self._device) if has_streams(self._device) else _resident("VmHWM")
            self.bytes = max(0, peak - self._start)


def _start_on(device: str) -> int:
    import torch

    torch.accelerator.reset_peak_memory_stats(torch.device(device))
    return torch.accelerator.memory_allocated(torch.device(device))


def _peak_on(device: str) -> int:
    import torch

    return torch.accelerator.max_memory_allocated(torch.device(device))


def _start_of_process() -> int | None:
    """The resident set, after the kernel has forgotten its peak; None where there is no such kernel."""
    try:
        _CLEAR_REFS.write_text("5")
        return _resident("VmRSS")
    except (OSError, LookupError):
        return None


def _resident(field: str) -> int:
    line = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if line is None:
        raise LookupError(field)
    return int(line[1]) * 1024
