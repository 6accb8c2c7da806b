"""Between torch tensors and the raw bytes of object files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool.errors import NotFiniteError
from pictool.runtime.device import has_streams


def to_bytes(tensor: Tensor) -> memoryview:
    """The contiguous little-endian bytes of a tensor of any dtype."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def from_bytes(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor over writable bytes, without a copy."""
    return torch.frombuffer(data, dtype=dtype).view(*shape)


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of these numbers on a device; the host does not wait for what the device has to do before."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if has_streams(device) else tensor.to(device)


def require_finite(what: str, dtype: str, *tensors: Tensor) -> None:
    """Refuse numbers that overflowed, or are none: everything that is computed from them would be wrong.

    Args:
        what: what computed them, and dtype: of computation; for the message.

    Raises:
        NotFiniteError: a tensor holds inf or nan.
    """
    numbers = tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    extremes = torch.stack(torch.aminmax(numbers))  # nan, if any is; several times faster than asking each number
    if not all(map(math.isfinite, extremes.tolist())):
        raise NotFiniteError(f"{what}: its results are not finite in {dtype}; use another --dtype")
