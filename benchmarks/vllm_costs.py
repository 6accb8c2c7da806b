"""Long links, bursts, and stores that are slow, inside vLLM: TTFT and throughput beside its prefix cache and without.

    .venv-vllm/bin/python -m benchmarks.vllm_costs --out benchmarks/results/vllm_costs.json

A random model of Qwen2.5-0.5B's width and three layers, float32, documents of 512 tokens in an order of its own for
each request. Four engines, each in a process of its own: one with the connector and a local store, two whose store is
empty before each request and whose remote answers with so many MB/s (a disk or a network of that rate), and one without
the connector. Their requests take turns; ratios are medians of the repeats' ratios, full prefill ÷ this: above 1 is
faster. A burst is many requests at once, each of two of the documents.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import write_results
from benchmarks.vllm_ttft import HEAD, QWEN, TAIL, TINY, Process, save_model

DOCUMENT, BURST_DOCUMENTS, VOCAB = 512, 2, 1400
POLICIES = ("naive", "legolink-16")
FULL, CACHE = "full prefill", "prefix cache"
_KV_BYTES, _PIECE, _DELAY_S = 2 << 30, 1 << 18, 0.002


def serve_files(pipe: Connection, directory: str, rate: float) -> None:
    """Serve a directory over HTTP with ranges, all answers together at `rate` MB/s, until killed."""
    import asyncio

    from aiohttp import web

    free = [0.0]  # when the line is free

    async def send(request: web.Request) -> web.StreamResponse:
        path = Path(directory, request.match_info["name"])
        await asyncio.sleep(_DELAY_S)
        if not path.is_file():
            raise web.HTTPNotFound
        data, part = path.read_bytes(), request.http_range
        start, stop, _ = part.indices(len(data))
        headers = {"Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
        is_part = part.start is not None or part.stop is not None
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        await response.prepare(request)
        if request.method == "GET":
            for at in range(start, stop, _PIECE):
                piece = data[at : min(stop, at + _PIECE)]
                free[0] = max(free[0], time.monotonic()) + len(piece) / (rate * 1e6)
                await asyncio.sleep(max(0.0, free[0] - time.monotonic()))
                await response.write(piece)
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{name:.*}", send)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


class Prompts:
    """Prompts of documents drawn anew, each in an order of its own."""

    def __init__(self, chunks: list[tuple[int, ...]], keys: list[str]) -> None:
        self._chunks, self._keys, self._draw = chunks, keys, np.random.default_rng(7)
        self._head, self._tail = ([int(t) for t in self._draw.integers(3, VOCAB, n)] for n in (HEAD, TAIL))

    def next(self, count: int) -> tuple[list[int], list[dict[str, Any]]]:
        """Tokens, and the key and start of every object."""
        tokens, places = list(self._head), []
        for index in self._draw.permutation(len(self._chunks))[:count].tolist():
            places.append({"key": self._keys[index], "start": len(tokens)})
            tokens += self._chunks[index]
        return [*tokens, *self._tail], places


def measure(
    engines: dict[str, Process], empty: Callable[[], None], prompts: Prompts, documents: int, requests: int, number: str
) -> dict[str, dict[str, float]]:
    """One repeat: of each way the seconds until the last of the requests has its token, and their median TTFT."""

    def ask(engine: str, policy: str | None, salt: str | None) -> dict[str, float]:
        drawn = [prompts.next(documents) for _ in range(requests)]
        params = None if policy is None else [{"pic": {"chunks": places, "policy": policy}} for _, places in drawn]
        salts = None if salt is None else [f"{salt} {index}" for index in range(requests)]
        empty()
        began = time.perf_counter()
        ttfts, _, _ = engines[engine].request([tokens for tokens, _ in drawn], params, salts)
        return {"last_s": time.perf_counter() - began, "median_ttft_s": statistics.median(ttfts)}

    found = {FULL: ask("plain", None, number), CACHE: ask("plain", None, None)}
    for engine in engines:
        if engine != "plain":
            found |= {f"{policy}, {engine}": ask(engine, policy, None) for policy in POLICIES}
    return found


def summary(repeats: list[dict[str, dict[str, float]]], requests: int) -> dict[str, Any]:
    """Medians, and ratios to full prefill."""
    return {
        name: {
            "median_ttft_s": round(statistics.median(one[name]["median_ttft_s"] for one in repeats), 3),
            "requests_per_s": round(statistics.median(requests / one[name]["last_s"] for one in repeats), 3),
            "ttft_ratio": round(
                statistics.median(one[FULL]["median_ttft_s"] / one[name]["median_ttft_s"] for one in repeats), 2
            ),
            "throughput_ratio": round(
                statistics.median(one[FULL]["last_s"] / one[name]["last_s"] for one in repeats), 2
            ),
        }
        for name in repeats[0]
    }


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from pictool import Chunk, Store, compile, load_model
    from pictool.store.remote.transfer import push

    shape = TINY if options.tiny else QWEN | {"num_hidden_layers": 3}
    directory, most = scratch / "model", max(*options.documents, BURST_DOCUMENTS)
    save_model(directory, shape)
    store = Store(scratch / "store", remote=str(scratch / "remote"))
    drawn = np.random.default_rng(0).integers(3, VOCAB, (most, DOCUMENT)).tolist()
    chunks = [Chunk(f"chunk {i}", tuple(row), "random") for i, row in enumerate(drawn)]
    keys = [done.key for done in compile(load_model(str(directory), "cpu", "float32"), store, chunks)]
    push(store, keys)
    context, servers, emptied = multiprocessing.get_context("spawn"), [], list[Path]()
    length = HEAD + most * DOCUMENT + TAIL + 1
    common = (length, options.threads, _KV_BYTES)
    engines = {
        "plain": Process(str(directory), None, *common),
        "local": Process(str(directory), str(store.root), *common),
    }
    for rate in options.rates:
        ours, theirs = context.Pipe()
        servers.append(context.Process(target=serve_files, args=(theirs, str(scratch / "remote"), rate), daemon=True))
        servers[-1].start()
        emptied.append(scratch / f"store{rate:g}")
        more = {"remote": f"http://127.0.0.1:{ours.recv()}"}
        engines[f"{rate:g} MB/s"] = Process(str(directory), str(emptied[-1]), *common, more)

    def empty() -> None:
        time.sleep(0.5)  # what the last request fetched is moved into the store in the background
        for root in emptied:
            shutil.rmtree(root / "objects", ignore_errors=True)

    prompts, found = Prompts([chunk.tokens for chunk in chunks], keys), dict[str, Any]()
    cases = [(f"1 of {count * DOCUMENT:,d} tokens", count, 1) for count in options.documents]
    cases.append((f"burst of {options.burst}", BURST_DOCUMENTS, options.burst))
    try:
        measure(engines, empty, prompts, cases[0][1], 1, "warm up")
        for name, documents, requests in cases:
            repeats = [
                measure(engines, empty, prompts, documents, requests, f"{name} {number}")
                for number in range(options.repeats)
            ]
            found[name] = {"medians": summary(repeats, requests), "repeats": repeats}
            print(name, found[name]["medians"], flush=True)
    finally:
        for engine in engines.values():
            engine.stop()
        for server in servers:
            server.terminate()
    return {"shape": shape, "kv_bytes_of_a_token": store.path(keys[0]).stat().st_size // DOCUMENT, "cases": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[8, 32], help="of single requests")
    parser.add_argument("--burst", type=int, default=64)
    parser.add_argument("--rates", type=float, nargs="+", default=[200.0, 20.0], help="MB/s of the remotes")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tiny", action="store_true", help="a model of a few layers: shows that all runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pic-vllm-") as scratch:
        found = run(options, Path(scratch))
    settings = {name: getattr(options, name) for name in ("rates", "repeats", "threads", "burst")}
    write_results(options.out, settings | found)


if __name__ == "__main__":
    main()
