"""Whose tables: those that the embedded model makes itself against those of the small one, on held-out worlds.

    python -m benchmarks.fixup_probe_models --out benchmarks/results

Prompts and columns are those of `fixups.py`; the first of each size and number of chunks are the same prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.asking import ask, kl
from benchmarks.fixups import CHUNKS, SIZES, Record, opened, prompt_of, questions_of, summarise
from pictool import Chunk, Store, compile, make_policy
from pictool.linker.grid import parse_grid
from pictool.runtime.machine import machine
from pictool.world.generate import KINDS

TABLES = (("embedded", 8), ("embedded-small", 8), ("embedded-small", 4))  # who measures, behind how many probes
RATIOS = "0.01,0.02,0.03,0.05,0.1,0.15,0.2"


def measure(size: int, chunks: int, index: int, per_kind: int) -> dict[str, Record]:
    """One prompt: full, naive, and fixup at every ratio by every table."""
    model, prompt = opened("embedded"), prompt_of(index, size, chunks)
    pages = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    questions, records = questions_of(prompt, per_kind), {}
    kinds = np.asarray([KINDS.index(question.kind) for question in questions])
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        full = ask(model, store, pages, questions, make_policy("full", {}))
        answers = {"full": full, "naive": ask(model, store, pages, questions, make_policy("naive", {}))}
        for name, probes in TABLES:
            compile(model, store, pages, probes=probes, probe_model=opened(name))
            for one in parse_grid([f"fixup:ratio={RATIOS}"]):
                answers[f"{one.label} by {name}, {probes} probes"] = ask(model, store, pages, questions, one.policy)
    for label, got in answers.items():
        records[label] = {"right": got.right, "kl": kl(full, got), "rows": got.rows, "kinds": kinds}
    return records


def study(size: int, prompts: int, per_kind: int, pool: ProcessPoolExecutor) -> Record:
    jobs = [(chunks, index) for index in range(prompts) for chunks in CHUNKS]
    asked, raw = [pool.submit(measure, size, chunks, index, per_kind) for chunks, index in jobs], []
    for number, one in enumerate(asked, 1):
        raw.append(one.result())
        print(f"{size}: {number} of {len(asked)} prompts", file=sys.stderr, flush=True)
    ends = [[one[label] for one in raw] for label in ("full", "naive")]
    return {
        "prompts": len(raw),
        "questions": int(sum(len(one["full"]["right"]) for one in raw)),
        "policies": {label: summarise([one[label] for one in raw], *ends) for label in raw[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for fixup_probe_models.json")
    parser.add_argument("--prompts", type=int, default=20, help="for each number of chunks; of the longest half of it")
    parser.add_argument("--per-kind", type=int, default=8, help="questions of each kind per prompt, at most")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    found: Record = {"machine": machine(), "prompts": arguments.prompts, "per_kind": arguments.per_kind, "sizes": {}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for size in SIZES:
            count = arguments.prompts // (2 if size == max(SIZES) else 1)
            found["sizes"][str(size)] = study(size, count, arguments.per_kind, pool)
            (arguments.out / "fixup_probe_models.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
