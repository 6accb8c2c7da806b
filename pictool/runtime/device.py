"""Devices and dtypes by the names that users give them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pictool.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def device_problem(name: str) -> str | None:
    """What is wrong with the name of a device; None if nothing is. Whether it is there is not looked at."""
    known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", name)
    return None if known else f"must be one of {', '.join(DEVICES)}"


def dtype_problem(name: str) -> str | None:
    """What is wrong with the name of a dtype; None if nothing is."""
    return None if name in DTYPES else f"must be one of {', '.join(DTYPES)}"


def resolve_device(device: str) -> str:
    """A device that is there: `auto` is CUDA if there is one.

    Raises:
        InputError: no such name, or no such device.
    """
    if problem := device_problem(device):
        raise InputError(f"device {device!r}: {problem}")
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise InputError(f"device {device!r}: this machine has no usable CUDA device; use --device cpu")
    if device != "cuda" and int(device[5:]) >= torch.cuda.device_count():
        raise InputError(f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(dtype: str, device: str, config: PretrainedConfig) -> str:
    """The dtype of computation: `auto` is float32 on a CPU, and the checkpoint's own dtype on CUDA.

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
