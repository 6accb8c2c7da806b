"""Tasks run in this process, or spread over processes that end with it. Results come as they get ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.compile import CODEC
from pictool.errors import InputError, PicError
from pictool.eval.contenders import Contender
from pictool.eval.row import Row
from pictool.eval.runner import Runner, Task
from pictool.store.remote import Remote
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_Workers = dict[Connection, SpawnProcess]


@dataclass(frozen=True)
class Job:
    """What each process needs to begin. `fingerprint` is of the model that is asked for."""

    name: str
    directory: Path
    device: str
    dtype: str
    fingerprint: str
    store: Path
    remote: Remote | None
    contenders: tuple[Contender, ...]
    threads: int
    codec: str

    def runner(self) -> Runner:
        """Opens the model in this process."""
        import torch
        from transformers.utils import logging

        from pictool.runtime.model import load_model

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(self.threads)
        model = load_model(str(self.directory), self.device, self.dtype)
        model.name = self.name
        if model.fingerprint != self.fingerprint:
            raise InputError(f"{self.name}: was replaced while it was being evaluated; run the command again")
        return Runner(model, Store(self.store, remote=self.remote), self.contenders, self.codec)


@dataclass(frozen=True)
class Crash:
    """A bug in a worker, to be shown by its parent."""

    trace: str


def make_job(
    model: Model, store: Store, contenders: Sequence[Contender], threads: int, codec: str = CODEC
) -> Job:  # fmt: skip
    if model.directory is None:
        raise InputError(f"{model.name}: is in memory, and other processes cannot open it; use one job")
    return Job(
        model.name, model.directory.absolute(), model.device, model.dtype, model.fingerprint, store.root.absolute(),
        store.remote, tuple(contenders), threads, codec,
    )  # fmt: skip


def run_here(runner: Runner, tasks: Sequence[Task], threads: int) -> Iterator[list[Row]]:
    """In this process, with so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for task in tasks:
            yield runner.run(task)
    finally:
        torch.set_num_threads(before)


def run_in_processes(job: Job, tasks: Sequence[Task], count: int) -> Iterator[list[Row]]:
    """In `count` processes. However this ends, they do.

    Raises:
        PicError: of the first task that failed, or of a process that was killed.
    """
    waiting = iter(tasks)
    with _started(job, count) as workers:
        busy = {connection for connection in workers if _give(connection, waiting)}
        while busy:
            for ready in wait([*busy]):
                assert isinstance(ready, Connection)
                rows = _take(ready, workers[ready])
                if not _give(ready, waiting):
                    busy.remove(ready)
                yield rows


def _give(connection: Connection, waiting: Iterator[Task]) -> bool:
    """Hand the next task to a worker; False if there is none. A worker that is dead is noticed when it is read."""
    task = next(waiting, None)
    if task is not None:
        try:
            connection.send(task)
        except OSError:
            return True
    return task is not None


def _take(connection: Connection, process: SpawnProcess) -> list[Row]:
    try:
        result = connection.recv()
    except (EOFError, OSError) as error:
        process.join(5)
        raise PicError(
            f"a worker process was ended (exit code {process.exitcode}; -9 is mostly a lack of memory); run this again "
            "with fewer --jobs, it continues"
        ) from error
    if isinstance(result, PicError):
        raise result
    if isinstance(result, Crash):
        raise RuntimeError(f"in a worker process:\n{result.trace}")
    rows: list[Row] = result
    return rows


@contextmanager
def _started(job: Job, count: int) -> Iterator[_Workers]:
    context = multiprocessing.get_context("spawn")
    workers: _Workers = {}
    try:
        with _deaf_to_interrupts():
            for _ in range(count):
                mine, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                workers[mine] = process
        yield workers
    finally:
        for process in workers.values():
            process.kill()
        for connection, process in workers.items():
            process.join()
            connection.close()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started within ignore Ctrl-C for good: their parent hears it, and ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection, job: Job) -> None:
    """A worker's life: tasks in, rows out, until its parent ends it, or is gone."""
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
