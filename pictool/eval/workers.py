"""Runs tasks in this process, or in worker processes that end with it. Results come as they get ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.compile import CODEC
from pictool.errors import InputError, PicError
from pictool.escapes import guard_streams
from pictool.eval.results import CaseResult
from pictool.eval.runner import GroupTask, Runner
from pictool.linker.grid import LabelledPolicy
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Trust
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_opened: list[Runner] = []  # the one of a worker process


@dataclass(frozen=True)
class WorkerConfig:
    """What each process needs to begin. `fingerprint` is that of the model that is evaluated."""

    name: str
    directory: Path
    device: str
    dtype: str
    fingerprint: str
    store: Path
    remote: Remote | None
    policies: tuple[LabelledPolicy, ...]
    threads: int
    codec: str
    salt: str = field(repr=False)
    trust: Trust | None = None

    def runner(self) -> Runner:
        """Open the model in this process."""
        import torch
        from transformers.utils import logging

        from pictool.runtime.model import load_model

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(self.threads)
        model = load_model(str(self.directory), self.device, self.dtype, self.salt)
        model.name = self.name
        if model.fingerprint != self.fingerprint:
            raise InputError(f"{self.name}: was replaced while it was being evaluated; run the command again")
        return Runner(model, Store(self.store, remote=self.remote, trust=self.trust), self.policies, self.codec)


def make_config(
    model: Model, objects: Store, policies: Sequence[LabelledPolicy], threads: int, codec: str = CODEC
) -> WorkerConfig:
    """What processes need for a model that is open here; `objects` is the store of their objects.

    Raises:
        InputError: the model is in memory only.
    """
    if model.directory is None:
        raise InputError(f"{model.name}: is in memory, and other processes cannot open it; use one job")
    return WorkerConfig(
        model.name, model.directory.absolute(), model.device, model.dtype, model.fingerprint,
        objects.root.absolute(), objects.remote, tuple(policies), threads, codec, model.salt, objects.trust,
    )  # fmt: skip


def run_here(runner: Runner, tasks: Sequence[GroupTask], threads: int) -> Iterator[list[CaseResult]]:
    """Run tasks in this process, with so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield from map(runner.run, tasks)
    finally:
        torch.set_num_threads(before)


def run_in_processes(config: WorkerConfig, tasks: Sequence[GroupTask], count: int) -> Iterator[list[CaseResult]]:
    """Run tasks in `count` processes. However this ends, the processes end too.

    Raises:
        PicError: of the first task that failed, or of a process that was killed.
    """
    others = {*multiprocessing.active_children()}
    with _interrupts_ignored(), _safe_path():  # the first task starts all processes
        executor = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin)
        futures = [executor.submit(_run, config, task) for task in tasks]
    try:
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise PicError(
            "a worker process ended, usually for too little memory; run it again with fewer --jobs, it continues"
        ) from error
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in {*multiprocessing.active_children()} - others:
            process.kill()
            process.join()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that are started within import nothing from the working directory: its files are anybody's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that are started within ignore Ctrl-C for good: their parent receives it, and ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin() -> None:
    """Prepare a worker process, which ends when its parent is gone, whatever is being computed."""
    guard_streams()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(config: WorkerConfig, task: GroupTask) -> list[CaseResult]:
    if not _opened:
        _opened.append(config.runner())
    return _opened[0].run(task)
