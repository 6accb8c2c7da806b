"""Requests per second of `pic serve` on its own engine and inside vLLM, by how many clients ask at once.

    .venv-vllm/bin/python -m benchmarks.serve_engines --out benchmarks/results/serve_engines.json

A random model of Qwen2.5-0.5B's width and six layers, float32. Each client asks again and again about four of eight
compiled documents (256 tokens each, caches of the server), under legolink-16, and gets 64 tokens. The two servers run
at the same time, and only one is asked at a time, in turns; the first round of each warms up and is dropped.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.output import write_results
from benchmarks.vllm_ttft import QWEN, save_model
from pictool.bench.prompts import random_text
from pictool.runtime.model import load_model

ENGINES = ("torch", "vllm")
DOCUMENTS, TOKENS, LINKED, ANSWER = 8, 256, 4, 64
_START_S = 300.0


@contextmanager
def serving(engine: str, directory: Path, scratch: Path, threads: int) -> Iterator[str]:
    """A server in a process of its own; yields its URL."""
    said = scratch / f"{engine}.txt"
    words = [sys.executable, "-m", "pictool", "serve", "--engine", engine, "-m", str(directory), "--device", "cpu"]
    words += ["--dtype", "float32", "--port", "0", "--algo", "legolink-16", "--store", str(scratch / engine)]
    limits = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with said.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=os.environ | limits)
    try:
        began = time.monotonic()
        while not (found := re.search(r"http://[\d.]+:\d+", said.read_text())) or not _is_ready(found[0]):
            assert process.poll() is None and time.monotonic() - began < _START_S, said.read_text()[-3000:]
            time.sleep(0.5)
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def make_caches(url: str, name: str, texts: list[str]) -> list[str]:
    with httpx.Client(base_url=url, timeout=300) as client:
        answers = [client.post("/v1/caches", json={"model": name, "text": text}).raise_for_status() for text in texts]
    return [answer.json()["id"] for answer in answers]


def run_round(url: str, name: str, caches: list[str], clients: int, each: int) -> dict[str, float]:
    """Seconds, requests and tokens of some clients that ask `each` times."""

    def ask(client: int) -> int:
        draw, tokens = random.Random(client), 0
        with httpx.Client(base_url=url, timeout=600) as session:
            for number in range(each):
                body = {
                    "model": name, "temperature": 0, "max_tokens": ANSWER, "cache_ids": draw.sample(caches, LINKED),
                    "messages": [{"role": "user", "content": f"Question {client} {number}: where was it?"}],
                }  # fmt: skip
                tokens += (
                    session.post("/v1/chat/completions", json=body)
                    .raise_for_status()
                    .json()["usage"]["completion_tokens"]
                )
        return tokens

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        tokens = sum(threads.map(ask, range(clients)))
    return {"seconds": time.perf_counter() - began, "requests": clients * each, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=2, help="requests of a client in a round")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    points = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="pic-engines-") as folder, ExitStack() as opened:
        scratch = Path(folder)
        directory = scratch / "model"
        save_model(directory, QWEN | {"num_hidden_layers": options.layers, "vocab_size": 2048})
        model = load_model(str(directory), "cpu", "float32")
        texts = [random_text(model, TOKENS, [0, index]) for index in range(DOCUMENTS)]
        urls = {
            engine: opened.enter_context(serving(engine, directory, scratch, options.threads)) for engine in ENGINES
        }
        names = {engine: httpx.get(f"{url}/v1/models").json()["data"][0]["id"] for engine, url in urls.items()}
        caches = {engine: make_caches(url, names[engine], texts) for engine, url in urls.items()}
        for clients in options.clients:
            rounds = [
                {
                    engine: run_round(urls[engine], names[engine], caches[engine], clients, options.each)
                    for engine in ENGINES
                }
                for _ in range(options.rounds + 1)
            ][1:]
            rates = {
                engine: statistics.median(one[engine]["requests"] / one[engine]["seconds"] for one in rounds)
                for engine in ENGINES
            }
            ratios = [one["torch"]["seconds"] / one["vllm"]["seconds"] for one in rounds]
            points.append({
                "clients": clients, "requests_per_s": {name: round(rate, 3) for name, rate in rates.items()},
                "vllm_over_torch": round(float(np.median(ratios)), 3), "rounds": rounds,
            })  # fmt: skip
            print({name: value for name, value in points[-1].items() if name != "rounds"}, flush=True)
    settings = {name: getattr(options, name) for name in ("rounds", "each", "layers", "threads")}
    write_results(options.out, settings | {"answer_tokens": ANSWER, "documents": LINKED, "points": points})


if __name__ == "__main__":
    main()
