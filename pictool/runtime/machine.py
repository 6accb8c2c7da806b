"""What a measurement was made on: nothing that names the machine or its user, all that its speed depends on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, memory, GPU, threads and versions; None where the system does not tell."""
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
        **{name: installed(name) for name in ("torch", "transformers", "pictool")},
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
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def installed(name: str) -> str | None:
    """The version of a package; None if it runs from its sources."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
