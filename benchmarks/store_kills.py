"""SIGKILL at random moments while many compiles and gcs run on one store: what is left is whole, nothing is lost.

    python -m benchmarks.store_kills --kills 1000 --out benchmarks/results/store_kills.json

The embedded model compiles pages; every worker reports each object through a pipe, after `compile` reported it. After
each batch of kills: every object in the store is read and checked; every reported object is there (under a budget: the
last ones, up to half of the budget); after a gc no temp file is left. At the end 16 processes link the same and other
prompts while a gc evicts all the time; each answer must be that of a link alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pictool.api import compile, link
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import Compiled
from pictool.errors import PicError
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store
from pictool.store.upkeep import gc, verify
from training.world.generate import write_prompt

CODECS = ("none", "zstd", "int8")
WRONG = ("damaged", "lost", "litter_after_gc", "over_budget", "failed")
TAIL = "\nQuestion: Which festival?\nAnswer:"


@dataclass(frozen=True)
class Result:
    """What was done, and what went wrong (which must be nothing)."""

    kills: int = 0
    kills_while_writing: int = 0
    said_written: int = 0
    objects_read: int = 0
    damaged: int = 0
    lost: int = 0
    litter_after_gc: int = 0
    litter_removed: int = 0
    over_budget: int = 0

    def __add__(self, other: Result) -> Result:
        a, b = asdict(self), asdict(other)
        return Result(**{name: a[name] + b[name] for name in a})


def pages(seed: int) -> list[str]:
    return list(write_prompt(random.Random(f"kills-{seed}"), 6).pages)


def spawn(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def compile_forever(model: Model, store: Store, seed: int, pipe: int) -> None:
    """Compile pages without end, half of them shared with other workers; report each key."""
    draw = random.Random(seed)

    def report(done: Compiled) -> None:
        os.write(pipe, done.key.encode() + b"\n")

    while True:
        shared = draw.random() < 0.5
        texts = pages(draw.randrange(20) if shared else draw.randrange(10**9))
        with suppress(PicError):
            compile(model, store, texts[:3], codec=draw.choice(CODECS), force=draw.random() < 0.5, on_done=report)


def gc_forever(store: Store) -> None:
    while True:
        gc(store)


def kill_batch(model: Model, store: Store, draw: random.Random, workers: int) -> tuple[Result, list[str]]:
    """Start compiles and a gc together, kill each at a moment of its own."""
    reader, writer = os.pipe()
    running = [
        spawn(lambda seed=draw.random(): compile_forever(model, store, seed, writer))  # type: ignore[misc]
        for _ in range(workers)
    ]
    running.append(spawn(lambda: gc_forever(store)))
    moments = sorted((draw.uniform(0.02, 0.25), pid) for pid in running)
    started, writing = time.monotonic(), 0
    for moment, pid in moments:
        time.sleep(max(0.0, started + moment - time.monotonic()))
        before = litter(store)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "a worker ended by itself"
        writing += bool(before)
    os.close(writer)
    with os.fdopen(reader) as reported:
        keys = reported.read().split()
    return Result(kills=len(running), kills_while_writing=writing, said_written=len(keys)), keys


def litter(store: Store) -> int:
    with suppress(FileNotFoundError):
        return len(os.listdir(store.root / "tmp"))
    return 0


def check(store: Store, written: list[str]) -> Result:
    """Read all objects, look for those that were reported, run a gc, and look for temp files."""
    verified = verify(store)
    stored, sizes = set(store.keys()), {key: store.path(key).stat().st_size for key in store.keys()}
    if store.max_bytes is not None:
        written = newest(written, sizes, store.max_bytes // 2)
    lost = [key for key in written if key not in stored]
    removed = gc(Store(store.root)).litter.count
    is_over = store.max_bytes is not None and sum(sizes.values()) > store.max_bytes
    return Result(
        objects_read=verified.objects, damaged=len(verified.problems), lost=len(lost), litter_after_gc=litter(store),
        litter_removed=removed, over_budget=int(is_over),
    )  # fmt: skip


def newest(written: list[str], sizes: dict[str, int], room: int) -> list[str]:
    """Of the keys in the order of their reports, the last ones that `room` bytes hold; a missing one takes the most."""
    most, kept = max(sizes.values(), default=1), list[str]()
    for key in dict.fromkeys(reversed(written)):
        room -= sizes.get(key, most)
        if room < 0:
            break
        kept.append(key)
    return kept


def kill_all(model: Model, kills: int, workers: int, max_bytes: int | None) -> Result:
    total, draw, written = Result(), random.Random(f"{kills}-{max_bytes}"), list[str]()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "store", max_bytes)
        while total.kills < kills:
            result, reported = kill_batch(model, store, draw, workers)
            written += reported
            total += result + check(store, written)
    return total


def logits_of(model: Model, store: Store, seed: int) -> torch.Tensor:
    chunks = [make_chunk(model, page, "page") for page in pages(seed)]
    logits = link(model, store, chunks, TAIL, make_policy("legolink", {})).image.logits
    assert logits is not None
    return logits


def link_together(model: Model, processes: int, links: int) -> dict[str, float]:
    """Many link while one evicts all the time: how far any answer is from that of a link alone."""
    with tempfile.TemporaryDirectory() as directory:
        alone = [logits_of(model, Store(Path(directory) / "alone"), seed) for seed in range(8)]
        store, (reader, writer) = Store(Path(directory) / "store"), os.pipe()

        def work(number: int) -> None:
            for turn in range(links):
                seed = (number * turn) % len(alone)
                apart = float((logits_of(model, store, seed) - alone[seed]).abs().max())
                os.write(writer, f"{apart}\n".encode())

        def evict() -> None:
            os.close(writer)
            while True:
                gc(store, 100_000)
                time.sleep(0.01)

        collector, running = spawn(evict), [spawn(lambda n=n: work(n)) for n in range(processes)]  # type: ignore[misc]
        os.close(writer)
        with os.fdopen(reader) as reported:
            apart = [float(line) for line in reported]
        failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in running)
        os.kill(collector, signal.SIGKILL)
        os.waitpid(collector, 0)
        damaged = len(verify(store).problems)
    return {"processes": processes, "links": len(apart), "failed": failed, "farthest": max(apart), "damaged": damaged}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(None, "cpu", "float32")
    _ = model.stack
    report: dict[str, Any] = {}
    for name, max_bytes in (("no budget", None), ("budget of 2 MB", 2_000_000)):
        report[name] = asdict(kill_all(model, options.kills // 2, options.workers, max_bytes))
        print(name, json.dumps(report[name]), flush=True)
    report["together"] = together = link_together(model, 16, max(2, options.kills // 50))
    print("together", json.dumps(together), flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [row.get(field) for row in report.values() for field in WRONG]
    if any(wrong) or together["farthest"] > 1e-4:
        raise SystemExit("something was damaged, lost or left behind")


if __name__ == "__main__":
    main()
