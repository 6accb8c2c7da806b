"""Triton kernels for links on a GPU: each is one launch for what torch needs many for, and can be in a CUDA graph.

- `rows_attention.rows_attention`: attention of scattered rows, without a mask.
- `place.place`: objects' keys and values from a staging buffer to their places, rotated.
- `pairing.pairing`: whether `place` rotates as the model does. It needs no Triton.

Both kernels are plain functions of tensors. Their modules import Triton: import them only if it is `available`.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


@cache
def available() -> bool:
    """Whether kernels run here: Triton is installed, and torch has a CUDA or ROCm device, or Triton interprets."""
    return find_spec("triton") is not None and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")
