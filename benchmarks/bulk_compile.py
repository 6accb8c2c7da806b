"""Bulk compile over Ray on this machine against `pic compile` in one process, on the same cores; and how cost grows.

    python -m benchmarks.bulk_compile --out benchmarks/results/bulk_compile.json

One process compiles some documents with one thread and with all, the better of which counts; then workers of one thread
each compile each number of documents, to an empty directory. *Running* counts from the first rows that a bulk compile
returns, since Ray and the models take seconds to start, whatever there is to do; the serial run counts without loading
its model. Worker seconds are those in which workers had a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.output import write_results
from pictool.cluster.bulk import Progress, compile_bulk
from pictool.cluster.loading import ModelSpec
from pictool.cluster.session import connected
from pictool.cluster.sources import Columns, find_sources
from pictool.cluster.worker import BulkSpec
from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import compile_chunks
from pictool.runtime.model import Model, load_model
from pictool.store.remote.remote import Remote
from pictool.store.store import Store

_WORDS = "river harbour festival spring number line document quiet town short water stone market north".split()


def texts_of(count: int, least: int, most: int) -> list[str]:
    """Documents of `least` to `most` words; no two are equal."""
    return [
        f"Document {number}. " + " ".join(_WORDS[(number * 7 + at * (1 + number % 5)) % 14] for at in range(length))
        for number in range(count)
        for length in [least + number * 37 % (most - least + 1)]
    ]


def run_serial(model: Model, texts: list[str], root: Path, threads: int) -> dict[str, float]:
    """As `pic compile` does it."""
    torch.set_num_threads(threads)
    began = time.perf_counter()
    chunks = [chunk for text in texts for chunk in make_chunks(model, text, "text")]
    compile_chunks(model, Store(root), chunks)
    seconds = time.perf_counter() - began
    return {"threads": threads, "seconds": seconds, "documents_s": len(texts) / seconds}


def run_bulk(model: str, texts: list[str], root: Path, workers: int) -> dict[str, Any]:
    source = root / "texts.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    seen: list[Progress] = []
    spec = BulkSpec(ModelSpec(model, "cpu"), Remote(str(root / "remote")))
    began = time.perf_counter()
    done = compile_bulk(find_sources([str(source)]), Columns(), spec, workers, seen.append).progress
    seconds = time.perf_counter() - began
    assert (done.documents, done.failed, done.new) == (len(texts), 0, done.chunks)
    first, last = seen[0], seen[-1]
    rest = last.seconds - first.seconds
    return {
        "seconds": seconds, "start_s": first.seconds, "batches": len(seen),
        "running_documents_s": (last.documents - first.documents) / rest if rest else None,
        "worker_ms_a_document": 1e3 * done.worker_s / done.documents,
        "driver_rss_mb": psutil.Process().memory_info().rss / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded-small")
    parser.add_argument("--documents", default="1000,5000,20000")
    parser.add_argument("--words", default="40,160", help="the least and the most of a document")
    parser.add_argument("--serial", type=int, default=300, help="documents of the serial runs")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ray", default="local", help="address of a cluster")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    words = tuple(map(int, options.words.split(",")))
    model, results = load_model(options.model, "cpu"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as root:
        run_serial(model, texts_of(50, *words), Path(root) / "warm up", 1)
        serial = [
            run_serial(model, texts_of(options.serial, *words), Path(root) / str(threads), threads)
            for threads in (1, options.workers)
        ]
    print(serial, flush=True)
    best = max(run["documents_s"] for run in serial)
    with connected(options.ray):
        for count in map(int, options.documents.split(",")):
            with tempfile.TemporaryDirectory() as root:
                bulk = run_bulk(options.model, texts_of(count, *words), Path(root), options.workers)
            rate = bulk["running_documents_s"]  # none of one batch
            results.append({"documents": count, "bulk": bulk, "ratio": rate and rate / best})
            print(results[-1], flush=True)
    if options.out is not None:
        more = {"words": words, "workers": options.workers, "load": os.getloadavg(), "serial": serial, "runs": results}
        write_results(options.out, more)


if __name__ == "__main__":
    main()
