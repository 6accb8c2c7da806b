"""Policy fixup against every other on held-out worlds: rows, answers by kind, KL; of either embedded model.

    python -m benchmarks.fixups --out benchmarks/results --model embedded

Every model makes its tables itself; `fixup_probe_models.py` has those of a smaller one.
Chunks of about 20, 60 and 200 tokens, 4 to 16 of them per prompt. Right: the whole greedy answer. Won back: of the
answers that naive reuse loses against full recompute. KL: of the first token's distribution from that of full, in nats.
Rows: mean share of context rows computed per layer. Intervals: 95 %, bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import bootstrap

from benchmarks.asking import ask, kl
from pictool import Chunk, Model, Store, compile, load_model
from pictool.linker.grid import Labelled, parse_grid
from pictool.runtime.machine import machine
from pictool.world.generate import KINDS, Prompt, Question, Shape, write_prompt
from training.score import HELD_OUT

SIZES = {20: 0, 60: 6, 200: 30}  # tokens of a chunk, about → sentences of filler per page, at most
CHUNKS = (4, 8, 16)
RATIOS = "0.01,0.02,0.03,0.05,0.1,0.15,0.2,0.3"
PUBLISHED = ("naive", "legolink", "legolink-0", "cacheblend", "speccache")
Record = dict[str, Any]  # of one prompt under one policy: kinds, right, kl [questions], rows


def policies_for(model: str) -> list[Labelled]:
    """Every policy, `full` first. Each embedded model is the other's speculative model."""
    spec = ":spec_model=embedded" if model == "embedded-small" else ""
    return parse_grid([
        "full", "naive", "legolink-0", "legolink:k=1,2,4,6,8,12,16,24,32,64",
        f"cacheblend:ratio={RATIOS}", f"speccache:ratio={RATIOS}{spec}", f"fixup:ratio={RATIOS},0.4,0.5",
        "fixup:ratio=0.02,0.05:budget=chunk", "fixup:budget=auto:threshold=0.25,0.5,0.75,1.0",
        "fixup:ratio=0.02,0.05:first=1,4",
    ])  # fmt: skip


@cache
def opened(name: str) -> Model:
    torch.set_num_threads(1)
    return load_model(name, device="cpu")


def prompt_of(index: int, size: int, chunks: int) -> Prompt:
    """A prompt that nothing was trained on; a draw that runs out of names is drawn again."""
    for attempt in range(100):
        with suppress(IndexError):
            draw = random.Random(f"{HELD_OUT}-fixups-{size}-{chunks}-{index}-{attempt}")
            return write_prompt(draw, chunks, Shape(max_filler_sentences=SIZES[size]))
    raise AssertionError(f"the names of the world do not last for {chunks} chunks")


def questions_of(prompt: Prompt, per_kind: int) -> list[Question]:
    return [q for kind in KINDS for q in [one for one in prompt.questions if one.kind == kind][:per_kind]]


def measure(name: str, size: int, chunks: int, index: int, per_kind: int) -> dict[str, Record]:
    """One prompt under every policy, and fixup over objects that were compiled with sinks."""
    model, prompt = opened(name), prompt_of(index, size, chunks)
    pages = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    questions, records = questions_of(prompt, per_kind), {}
    runs: list[tuple[str, Any, dict[str, int]]] = [(one.label, one.policy, {}) for one in policies_for(name)]
    runs += [(f"{one.label} sinks=4", one.policy, {"sinks": 4}) for one in parse_grid(["fixup-2", "fixup-5"])]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        for sinks in (0, 4):
            compile(model, store, pages, probes=8, sinks=sinks, probe_model=model)
        full = None
        for label, policy, options in runs:
            got = ask(model, store, pages, questions, policy, **options)
            full = got if full is None else full
            records[label] = {"right": got.right, "kl": kl(full, got), "rows": got.rows}
    kinds = np.asarray([KINDS.index(question.kind) for question in questions])
    tokens = float(np.mean([len(page) for page in pages]))
    return {label: {**record, "kinds": kinds, "tokens": tokens} for label, record in records.items()}


def interval(values: NDArray[np.float64], base: NDArray[np.float64]) -> list[float]:
    """95 % bootstrap interval of sum(values) / sum(base), over prompts."""
    if not np.abs(values).any():
        return [0.0, 0.0]
    done = bootstrap(
        (values, base), lambda v, b, axis: v.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        n_resamples=2000, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    return [round(float(bound), 4) for bound in (done.confidence_interval.low, done.confidence_interval.high)]


def summarise(records: list[Record], full: list[Record], naive: list[Record]) -> Record:
    """Of one policy's records, one a prompt."""
    count = np.asarray([len(one["right"]) for one in records], dtype=float)
    right, best, worst = (np.asarray([r["right"].sum() for r in many]) for many in (records, full, naive))
    deviation = np.asarray([one["kl"].sum() for one in records])
    hits, kinds = (np.concatenate([one[field] for one in records]) for field in ("right", "kinds"))
    lost = best.sum() - worst.sum()
    return {
        "rows": round(float(np.mean([one["rows"] for one in records])), 4),
        "right": round(float(right.sum() / count.sum()), 4),
        "right_interval": interval(right, count),
        "won_back": round(float((right - worst).sum() / lost), 4),
        "won_back_interval": interval(right - worst, best - worst),
        "kl": round(float(deviation.sum() / count.sum()), 5),
        "kl_interval": interval(deviation, count),
        "by_kind": {
            kind: round(float(hits[kinds == i].mean()), 4) for i, kind in enumerate(KINDS) if (kinds == i).any()
        },
    }


def thirds(rows: dict[str, Record]) -> list[Record]:
    """For every KL that a published policy reaches at least rows: the rows that fixup needs for it.

    Only points with fewer rows than any other published one of no larger KL count. Fixup's rows are those of the
    smallest ratio measured that is no farther from full; None if none is.
    """
    known = [(one["rows"], one["kl"], label) for label, one in rows.items() if _family(label) in PUBLISHED]
    ours = [(one["rows"], one["kl"]) for label, one in rows.items() if _is_plain_fixup(label)]
    best = [p for p in known if 0 < p[0] < 1 and not any(q[0] < p[0] and q[1] <= p[1] for q in known)]
    found = []
    for share, deviation, label in sorted(best):
        need = min((mine for mine, of_mine in ours if of_mine <= deviation), default=None)
        ratio = None if need is None else round(need / share, 3)
        found.append({"policy": label, "rows": share, "kl": deviation, "fixup_rows": need, "share": ratio})
    return found


def _family(label: str) -> str:
    return label if label == "legolink-0" else label.split("-")[0].split(":")[0]


def _is_plain_fixup(label: str) -> bool:
    return label.startswith("fixup-") and ":" not in label and " " not in label


def study(name: str, size: int, counts: dict[int, int], per_kind: int, pool: ProcessPoolExecutor) -> Record:
    """One model and one size of chunks, over all numbers of chunks."""
    jobs = [(chunks, index) for chunks, prompts in counts.items() for index in range(prompts)]
    jobs.sort(reverse=True)  # long ones first
    asked = [pool.submit(measure, name, size, chunks, index, per_kind) for chunks, index in jobs]
    raw = []
    for number, one in enumerate(asked, 1):
        raw.append(one.result())
        print(f"{name} {size}: {number} of {len(asked)} prompts", file=sys.stderr, flush=True)
    found = {"all": _summary(raw)}
    for chunks in counts:
        found[f"{chunks} chunks"] = _summary([one for one, job in zip(raw, jobs, strict=True) if job[0] == chunks])
    return found


def _summary(raw: list[dict[str, Record]]) -> Record:
    rows = {
        label: summarise([one[label] for one in raw], [one["full"] for one in raw], [one["naive"] for one in raw])
        for label in raw[0]
    }
    return {
        "prompts": len(raw),
        "questions": int(sum(len(one["full"]["right"]) for one in raw)),
        "tokens_per_chunk": round(float(np.mean([one["full"]["tokens"] for one in raw])), 1),
        "policies": rows,
        "thirds": thirds(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for fixups-MODEL.json")
    parser.add_argument("--prompts", type=int, default=24, help="for each number of chunks; of the longest half of it")
    parser.add_argument("--per-kind", type=int, default=8, help="questions of each kind per prompt, at most")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    arguments = parser.parse_args()
    found: Record = {"machine": machine(), "prompts": arguments.prompts, "per_kind": arguments.per_kind, "sizes": {}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for size in arguments.sizes:
            counts = dict.fromkeys(CHUNKS, arguments.prompts // (2 if size == max(SIZES) else 1))
            found["sizes"][str(size)] = study(arguments.model, size, counts, arguments.per_kind, pool)
            (arguments.out / f"fixups-{arguments.model}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
