"""How fast `pic tui` is: cursor moves on a 32k-token trace, the start on a store of 10,000 objects.

    python -m benchmarks.tui_speed --out benchmarks/results

Moves: keys are pressed in the app without a terminal (textual's own driver for tests) at 160 × 50; what counts is
the time that the event loop spends from a key to the next idle moment, layout and drawing among it: a frame cannot
take longer.
Start: `pic tui` in a pseudo-terminal, from starting the process to the first key of the store on the screen; and the
CPU time of it, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import numpy as np

from benchmarks.output import write_results
from pictool.core import Geometry, Layout, Target
from pictool.store.objects.format import CompiledChunk, ObjectMeta, write_object
from pictool.store.store import Store
from pictool.trace.format import Candidate, GeneratedToken, Trace, TracedChunk, write_trace

TOKENS, CHUNKS, LAYERS, OBJECTS = 32_768, 64, 28, 10_000
SIZE = (160, 50)
MOVES = {
    "tokens": ["right"] * 40 + ["down"] * 40 + ["pagedown"] * 40 + ["pageup"] * 20 + ["end", "home"] * 10 + ["]"] * 20,
    "map": ["right"] * 40 + ["left"] * 20 + ["right"] * 40,
}


def long_trace() -> Trace:
    """Random tokens, some of them computed at every layer, some at the first ones only."""
    draw = np.random.default_rng(0)
    words = [" harbour", " quiet", " 東京", ".\n", " it", "ing", " festival", ","]
    pieces = tuple(words[i] for i in draw.integers(0, len(words), TOKENS))
    size = (TOKENS - 64) // CHUNKS
    starts = (0, *(1 + i * size for i in range(CHUNKS)), 1 + CHUNKS * size)
    rows = np.sort(draw.random((LAYERS, TOKENS)) < 0.2, axis=0)[::-1].copy()
    rows[:, starts[-1] :] = True
    chunks = tuple(TracedChunk(f"{i}.txt", f"{i:064x}") for i in range(CHUNKS))
    times = dict.fromkeys(("load_s", "select_s", "recompute_s", "ttft_s", "decode_s"), 0.1)
    counts = {"head": 1, "context": starts[-1], "tail": TOKENS - starts[-1], "prompt": TOKENS, "recomputed": 1.0}
    report: dict[str, Any] = {
        "answer": "yes", "algo": "cacheblend", "params": {"ratio": 0.2}, "model": "none", "engine": "none",
        "tokens": counts | {"generated": 1}, "timing": times, "compare": None,
    }  # fmt: skip
    return Trace(
        Target("llama", "a" * 64, "b" * 64, "float32", Geometry(LAYERS, 2, 4)),
        Layout(np.zeros(TOKENS, dtype=np.int32), starts), rows, draw.normal(size=32_000).astype(np.float32),
        draw.random(TOKENS).astype(np.float32), ("",) * (CHUNKS + 2), chunks, pieces,
        (GeneratedToken(3, " yes", -0.5),), (Candidate(3, " yes"),), report,
    )  # fmt: skip


def fill_store(root: Path) -> None:
    """10,000 small objects, without the fsync of each that `Store.put` takes its time for."""
    store, target = Store(root), Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(2, 1, 4))
    store.ensure_store()
    for index in range(OBJECTS):
        tokens = np.full(8, index, dtype=np.int32)
        meta = ObjectMeta(target.key(tokens, "none"), target, 8, "none")
        store.path(meta.key).parent.mkdir(parents=True, exist_ok=True)
        with store.path(meta.key).open("wb") as file:
            write_object(
                file, CompiledChunk(meta, f"The text of object {index}.", tokens, [(bytes(128), bytes(128))] * 2)
            )


@contextmanager
def watched_loop() -> Iterator[list[tuple[float, float]]]:
    """Wall and CPU seconds of every callback that asyncio runs."""
    original, times = asyncio.Handle._run, list[tuple[float, float]]()

    def run(handle: asyncio.Handle) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        original(handle)
        times.append((time.perf_counter() - wall, time.thread_time() - cpu))

    asyncio.Handle._run = run  # type: ignore[assignment, method-assign]
    try:
        yield times
    finally:
        asyncio.Handle._run = original  # type: ignore[method-assign]


async def moves(path: Path, store: Path) -> dict[str, Any]:
    from pictool.commands.settings.settings import Settings
    from pictool.commands.tui import open_app

    no_job: Any = _NoJob()
    app, times = open_app([str(path)], Settings().override(store=str(store)), no_job), {}
    async with app.run_test(size=SIZE) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause(1)
        for name, keys in MOVES.items():
            app.screen.query_one("TokensView" if name == "tokens" else "HeatMap").focus()
            await pilot.pause(0.5)
            times[name] = await _press(pilot, keys)
    return times


async def _press(pilot: Any, keys: list[str]) -> dict[str, Any]:
    """Milliseconds per key: all callbacks together, and the longest one."""
    wall, cpu, longest = [], [], []
    with watched_loop() as callbacks:
        for key in keys:
            callbacks.clear()
            await pilot.press(key)
            await pilot.pause()
            wall.append(1e3 * sum(wall_s for wall_s, _ in callbacks))
            cpu.append(1e3 * sum(cpu_s for _, cpu_s in callbacks))
            longest.append(1e3 * max(wall_s for wall_s, _ in callbacks))
    return {
        "keys": len(keys), "median_ms": statistics.median(wall), "p95_ms": float(np.percentile(wall, 95)),
        "max_ms": max(wall), "max_cpu_ms": max(cpu), "longest_callback_ms": max(longest),
    }  # fmt: skip


class _NoJob:
    def cancel(self) -> None:
        """Nothing runs."""


def start(store: Path) -> tuple[float, float, float]:
    """Seconds until the first frame, until the first object's key is on the screen, and of CPU until then."""
    key = Store(store).keys()[0][:12].encode()
    leader, follower = pty.openpty()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    module, function = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]["pic"].split(":")
    command = [sys.executable, "-c", f"from {module} import {function}; {function}()", "tui", str(store)]
    began, seen, first = time.perf_counter(), b"", 0.0
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    while key not in seen and time.perf_counter() - began < 60:
        if select.select([leader], [], [], 0.05)[0]:
            seen += os.read(leader, 1 << 16)
            first = first or (b"help" in seen) * (time.perf_counter() - began)
    took, cpu = time.perf_counter() - began, _cpu_seconds(process.pid)
    process.kill()
    process.wait()
    os.close(leader)
    os.close(follower)
    assert key in seen, "the store was not shown"
    return first, took, cpu


def _cpu_seconds(pid: int) -> float:
    """User and system time of a running process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root, path = Path(directory) / "store", Path(directory) / "long.trace"
        fill_store(root)
        start(root)  # which indexes the store
        write_trace(path, long_trace())
        (Path(directory) / "empty").mkdir()
        results: dict[str, Any] = {"tokens": TOKENS, "layers": LAYERS, "size": SIZE, "objects": OBJECTS}
        results["load_average"] = os.getloadavg()
        results["moves"] = asyncio.run(moves(path, Path(directory) / "empty"))
        results["start_s"] = [start(root) for _ in range(5)]
        write_results(options.out / "tui_speed.json", results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
