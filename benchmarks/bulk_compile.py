"""Bulk compile over Ray on this machine against `pic compile` in one process, on the same cores; and how cost grows.

    python -m benchmarks.bulk_compile --out benchmarks/results/bulk_compile.json

For each number of documents: one process compiles them with all threads, then workers of one thread each do, to an
empty directory each. *Running* counts from the first rows that a bulk compile returns, since Ray and the models take
seconds to start, whatever there is to do; the serial run counts without loading its model. Worker seconds are those in
which workers had a batch.
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

from benchmarks.output import write_results
from pictool.cluster.bulk import Progress, compile_bulk
from pictool.cluster.session import connected
from pictool.cluster.sources import Columns, find_sources
from pictool.cluster.worker import BulkSpec
from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import compile_chunks
from pictool.runtime.model import Model, load_model
from pictool.store.remote import Remote
from pictool.store.store import Store

_WORDS = "river harbour festival spring number line document quiet town short water stone market north".split()


def texts_of(count: int) -> list[str]:
    """Documents of 40 to 160 words; no two are equal."""
    return [
        f"Document {number}. " + " ".join(_WORDS[(number * 7 + at * (1 + number % 5)) % 14] for at in range(length))
        for number in range(count)
        for length in [40 + number * 37 % 121]
    ]


def run_serial(model: Model, texts: list[str], root: Path) -> dict[str, float]:
    """As `pic compile` does it."""
    began = time.perf_counter()
    chunks = [chunk for text in texts for chunk in make_chunks(model, text, "text")]
    compile_chunks(model, Store(root), chunks)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "documents_s": len(texts) / seconds}


def run_bulk(model: str, texts: list[str], root: Path, workers: int) -> dict[str, float]:
    source = root / "texts.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    seen: list[Progress] = []
    spec = BulkSpec(Remote(str(root / "remote")), model, "cpu")
    began = time.perf_counter()
    done = compile_bulk(find_sources([str(source)]), Columns(), spec, workers, seen.append).progress
    seconds = time.perf_counter() - began
    assert (done.documents, done.failed, done.new) == (len(texts), 0, done.chunks)
    first, last = seen[0], seen[-1]
    rest = last.seconds - first.seconds
    return {
        "seconds": seconds, "start_s": first.seconds, "batches": len(seen),
        "running_documents_s": (last.documents - first.documents) / rest if rest else float("nan"),
        "worker_ms_a_document": 1e3 * done.worker_s / done.documents,
        "driver_rss_mb": psutil.Process().memory_info().rss / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded-small")
    parser.add_argument("--documents", default="1000,5000,20000")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ray", default="local", help="address of a cluster")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = load_model(options.model, "cpu")
    with tempfile.TemporaryDirectory() as root:  # what is loaded and warmed up once
        run_serial(model, texts_of(50), Path(root))
    results: list[dict[str, Any]] = []
    with connected(options.ray):
        for count in map(int, options.documents.split(",")):
            texts = texts_of(count)
            with tempfile.TemporaryDirectory() as root:
                serial = run_serial(model, texts, Path(root) / "serial")
                bulk = run_bulk(options.model, texts, Path(root), options.workers)
            ratio = bulk["running_documents_s"] / serial["documents_s"]
            results.append({"documents": count, "serial": serial, "bulk": bulk, "ratio": ratio})
            print(results[-1], flush=True)
    if options.out is not None:
        write_results(options.out, {"workers": options.workers, "load": os.getloadavg(), "runs": results})


if __name__ == "__main__":
    main()
