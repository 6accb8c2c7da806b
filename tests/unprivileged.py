"""Code that runs as a user who may not read everything: also where the tests run as root."""

from __future__ import annotations

import ctypes
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2  # capabilities of root: to read and list what permissions forbid
_PR_CAPBSET_DROP, _CAPGET, _CAPSET, _VERSION = 24, 125, 126, 0x20080522


def unprivileged(run: Callable[[], T]) -> T:
    """What a function returns in a child process, in which permissions hold for root, too."""
    if os.geteuid() != 0:
        return run()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        result: Any = None
        try:
            result = run() if _drop() else "no rights"
        finally:
            os.write(write, pickle.dumps(result))
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        result = pickle.load(pipe)
    os.waitpid(child, 0)
    if result == "no rights":
        pytest.skip("root's rights cannot be dropped here")
    return result  # type: ignore[no-any-return]


def _drop() -> bool:
    """Give up root's right to read everything, for what this process starts, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("<Ii", _VERSION, 0), ctypes.create_string_buffer(24)
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if libc.syscall(_CAPGET, header, data):
        return False
    words = list(struct.unpack("<6I", data.raw))
    for index in range(3):  # effective, permitted, inheritable
        words[index] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    return bool(libc.syscall(_CAPSET, header, struct.pack("<6I", *words)) == 0)
