"""Devices and dtypes by the names that users give them, and what is asked of a device whatever its kind.

Everything goes through torch's device-agnostic API (`torch.accelerator`, `torch.get_device_module`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pictool.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ACCELERATORS = ("cuda", "xpu", "mps")  # ROCm's devices are named cuda as well
DEVICES = ("auto", "cpu", *ACCELERATORS)
DTYPES = ("auto", "float32", "bfloat16", "float16")


def device_problem(name: str) -> str | None:
    """What is wrong with the name of a device; None if nothing is. Whether it is there is not looked at."""
    known = re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", name)
    return None if known else f"must be one of {', '.join(DEVICES)}"


def dtype_problem(name: str) -> str | None:
    """What is wrong with the name of a dtype; None if nothing is."""
    return None if name in DTYPES else f"must be one of {', '.join(DTYPES)}"


def accelerator() -> str | None:
    """The kind of accelerator that is usable here, one of `ACCELERATORS`; None: there is none."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in ACCELERATORS else None


def resolve_device(device: str) -> str:
    """A device that is there: `auto` is the accelerator if there is one.

    Raises:
        InputError: no such name, or no such device.
    """
    if problem := device_problem(device):
        raise InputError(f"device {device!r}: {problem}")
    if device == "cpu":
        return device
    found = accelerator()
    if device == "auto":
        return found or "cpu"
    kind, _, index = device.partition(":")
    if kind != found:
        has = f"its accelerator is {found}" if found else "use --device cpu"
        raise InputError(f"device {device!r}: this machine has no usable {kind} device; {has}")
    if index and int(index) >= (count := device_count()):
        raise InputError(f"device {device!r}: this machine has {count} {kind} devices")
    return device


def device_count() -> int:
    """How many accelerators there are."""
    import torch

    return torch.accelerator.device_count() if accelerator() else 0


def device_memory_bytes(device: str) -> int | None:
    """The memory of an accelerator; None where it is the machine's own, or not told."""
    import torch

    if not has_streams(device):
        return None
    whole: int = torch.get_device_module(device).get_device_properties(torch.device(device)).total_memory
    return whole


def is_accelerator(device: str | torch.device) -> bool:
    """Whether a device is another one than the CPU."""
    return _type_of(device) != "cpu"


def has_streams(device: str | torch.device) -> bool:
    """Whether a device runs queues of work beside each other, and copies from page-locked memory while it computes.

    Apple's GPUs share the host's memory: what is copied to them is copied at once.
    """
    return _type_of(device) not in ("cpu", "mps")


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has done all its work. A CPU always has."""
    import torch

    kind = _type_of(device)
    if kind == "mps":
        torch.mps.synchronize()
    elif kind != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def device_name(device: str | torch.device) -> str:
    """What the maker calls an accelerator; its kind where torch does not say."""
    import torch

    module = torch.get_device_module(torch.device(device))
    named = getattr(module, "get_device_name", None)
    return str(named(torch.device(device))) if named else _type_of(device)


def device_memory(device: str | torch.device) -> tuple[int, int] | None:
    """Bytes that are free and that there are on an accelerator; None if it does not say."""
    import torch

    if not has_streams(device):
        return None
    free, total = torch.accelerator.get_memory_info(torch.device(device))
    return int(free), int(total)


def _type_of(device: str | torch.device) -> str:
    return device.partition(":")[0] if isinstance(device, str) else str(device.type)


def resolve_dtype(dtype: str, device: str, config: PretrainedConfig) -> str:
    """The dtype of computation: `auto` is float32 on a CPU, and the checkpoint's own dtype on an accelerator.

    Raises:
        InputError: no such name.
    """
    if problem := dtype_problem(dtype):
        raise InputError(f"dtype {dtype!r}: {problem}")
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    return str(config.dtype or "float32").removeprefix("torch.")
