"""Ray as this package uses it: whether it is installed, and a connection to a cluster or a local one that is quiet."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager

from pictool.errors import InputError

LOCAL = "local"
DEFAULT = "default"  # what RAY_ADDRESS names, else this machine
_CONNECT_S = 10.0
PACKAGES = ("ray", "pyarrow")


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster; disconnect at the end of the context.

    Args:
        address: HOST:PORT, `ray://…`, `auto` (that of this machine); `local` starts one of this machine's CPUs and
            GPUs, which ends with this; `default` is what RAY_ADDRESS names, else `local`.

    Raises:
        InputError: there is no cluster at this address, or it has another version of Ray or Python.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here: nothing is reported
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it warns of what Ray Data does, on this stderr
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's is 15: beside other work replicas got no processor
    import ray

    address = os.environ.get("RAY_ADDRESS") or LOCAL if address == DEFAULT else address
    if ray.is_initialized():
        yield
        return
    try:
        _require_listening(address)
        # What is in the working directory is not code of ours: Ray puts it at the head of the workers' import path.
        with open(os.devnull, "w") as nothing, _redirected(2, nothing.fileno()), chdir("/"):  # it says the level
            ray.init(
                address, logging_level=logging.ERROR, log_to_driver=False,
                include_dashboard=False if address == LOCAL else None,
            )  # fmt: skip
    except Exception as error:  # a node that does not start in time is an Exception of no other class
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"--ray {address}: no usable cluster at this address ({why}); start one with ray start"
        ) from error
    try:
        with _redirected(1, 2):  # stdout is for results
            yield
    finally:
        ray.shutdown()


def cluster_resources() -> dict[str, float]:
    """CPUs and GPUs of the cluster that Ray is connected to, as far as it knows."""
    import ray

    return dict(ray.cluster_resources())


def _require_listening(address: str) -> None:
    """Raise OSError unless something listens at HOST:PORT, since Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


@contextmanager
def _redirected(fd: int, to: int) -> Iterator[None]:
    """What anyone writes to a descriptor meanwhile goes to another one."""
    _flush()
    kept = os.dup(fd)
    try:
        os.dup2(to, fd)
        yield
    finally:
        _flush()
        os.dup2(kept, fd)
        os.close(kept)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
