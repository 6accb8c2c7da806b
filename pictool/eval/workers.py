"""Runs tasks in this process, or in worker processes that end with it. Results come as they get ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.compile import CODEC
from pictool.errors import InputError, PicError
from pictool.escapes import guard_streams
from pictool.eval.algorithms import Algorithm
from pictool.eval.results import CaseResult
from pictool.eval.runner import GroupTask, Runner
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Trust
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_Workers = dict[Connection, SpawnProcess]


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
    algorithms: tuple[Algorithm, ...]
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
        return Runner(model, Store(self.store, remote=self.remote, trust=self.trust), self.algorithms, self.codec)


@dataclass(frozen=True)
class Crash:
    """A bug in a worker, to be shown by its parent."""

    trace: str


def make_job(
    model: Model, store: Store, algorithms: Sequence[Algorithm], threads: int, codec: str = CODEC
) -> WorkerConfig:
    """The job of a model on disk.

    Raises:
        InputError: the model is in memory only.
    """
    if model.directory is None:
        raise InputError(f"{model.name}: is in memory, and other processes cannot open it; use one job")
    return WorkerConfig(
        model.name, model.directory.absolute(), model.device, model.dtype, model.fingerprint, store.root.absolute(),
        store.remote, tuple(algorithms), threads, codec, model.salt, store.trust,
    )  # fmt: skip


def run_here(runner: Runner, tasks: Sequence[GroupTask], threads: int) -> Iterator[list[CaseResult]]:
    """Run tasks in this process, with so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for task in tasks:
            yield runner.run(task)
    finally:
        torch.set_num_threads(before)


def run_in_processes(job: WorkerConfig, tasks: Sequence[GroupTask], count: int) -> Iterator[list[CaseResult]]:
    """Run tasks in `count` processes. However this ends, the processes end too.

    Raises:
        PicError: of the first task that failed, or of a process that was killed.
    """
    queue = iter(tasks)
    with _start_workers(job, count) as workers:
        busy = {connection for connection in workers if _send_next(connection, queue)}
        while busy:
            for ready in wait([*busy]):
                assert isinstance(ready, Connection)
                results = _receive(ready, workers[ready])
                if not _send_next(ready, queue):
                    busy.remove(ready)
                yield results


def _send_next(connection: Connection, queue: Iterator[GroupTask]) -> bool:
    """Send the next task to a worker; False if there is none. A dead worker is noticed when it is read from."""
    task = next(queue, None)
    if task is not None:
        try:
            connection.send(task)
        except OSError:
            return True
    return task is not None


def _receive(connection: Connection, process: SpawnProcess) -> list[CaseResult]:
    """The results of a worker's task. Raises what the worker raised."""
    try:
        result = connection.recv()
    except (EOFError, OSError) as error:
        process.join(5)
        raise PicError(
            f"a worker process ended (exit code {process.exitcode}; -9 usually means too little memory); run it again "
            "with fewer --jobs, it continues"
        ) from error
    if isinstance(result, PicError):
        raise result
    if isinstance(result, Crash):
        raise RuntimeError(f"in a worker process:\n{result.trace}")
    results: list[CaseResult] = result
    return results


@contextmanager
def _start_workers(job: WorkerConfig, count: int) -> Iterator[_Workers]:
    context = multiprocessing.get_context("spawn")
    workers: _Workers = {}
    try:
        with _interrupts_ignored(), _safe_path():
            for _ in range(count):
                connection, worker_end = context.Pipe()
                process = context.Process(target=_work, args=(worker_end, job), daemon=True)
                process.start()
                worker_end.close()
                workers[connection] = process
        yield workers
    finally:
        for process in workers.values():
            process.kill()
        for connection, process in workers.items():
            process.join()
            connection.close()


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


def _work(connection: Connection, job: WorkerConfig) -> None:
    """The main function of a worker: receives tasks and sends results, until its parent ends it, or is gone."""
    guard_streams()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):
        try:
            runner = job.runner()
            while True:
                connection.send(runner.run(connection.recv()))
        except PicError as error:
            connection.send(error)
        except (EOFError, ConnectionError):
            raise
        except Exception:
            connection.send(Crash(traceback.format_exc()))


def _end_with_parent() -> None:
    """End at once when the parent is gone, whatever is being computed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
