"""Each codec × policy on held-out questions of the embedded model: score, and the paired difference to codec `none`.

    python -m benchmarks.codec_quality --out benchmarks/results/codec_quality.json

`pic eval` on its dataset `world`, once for every codec, in a results file each (--work DIR continues them). A question
is compared with itself under the same policy and codec `none`: difference of scores, KL of the first token's
distribution from full recompute. Intervals: 95 %, bootstrap over prompts. `raw` has each question's score, as a digit,
and its KL in nats, in the order of `units`, the numbers of questions of each prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from pictool import Store, load_model
from pictool.eval.algorithms import FULL, parse_algorithms
from pictool.eval.cases import SpecOptions
from pictool.eval.datasets import open_dataset
from pictool.eval.evaluate import Evaluation, RunOptions, evaluate
from pictool.eval.results import CaseResult
from pictool.eval.statistics import clustered_mean
from pictool.runtime.machine import machine

CODECS = ("none", "zstd", "int8", "fp8", "int4")
SPECS = ("naive", "legolink-0", "legolink-16", "cacheblend-15", "speccache-15", "fixup-10")
Rows = dict[str, list[CaseResult]]  # by label, in the order of the dataset


def rows_of(done: Evaluation) -> Rows:
    found: Rows = {}
    for row in done.rows:
        found.setdefault(row.label, []).append(row)
    return found


def compared(rows: Sequence[CaseResult], plain: Sequence[CaseResult], groups: Sequence[int]) -> dict[str, Any]:
    """One policy's answers over coded objects, question by question beside those over plain ones."""
    assert [row.id for row in rows] == [row.id for row in plain]
    pairs = list(zip(rows, plain, strict=True))
    apart = [score(row) - score(other) for row, other in pairs]
    kls = [(row.kl or 0.0) - (other.kl or 0.0) for row, other in pairs]
    return {
        "score": asdict(clustered_mean([score(row) for row in rows], groups)),
        "difference": asdict(clustered_mean(apart, groups)),
        "lost": sum(one < 0 for one in apart), "won": sum(one > 0 for one in apart),
        "other_answer": sum(row.answer != other.answer for row, other in pairs),
        "kl": fmean(row.kl or 0.0 for row in rows), "kl_difference": asdict(clustered_mean(kls, groups)),
        "bytes_read": fmean(row.bytes_read for row in rows),
    }  # fmt: skip


def score(row: CaseResult) -> float:
    return row.scores[row.metric]


def raw(rows: Sequence[CaseResult]) -> dict[str, Any]:
    return {
        "score": "".join(str(int(score(row))) for row in rows),
        "kl": [float(f"{row.kl:.3g}") for row in rows if row.kl is not None],
    }


def measure(prompts: int, chunks: int, dtype: str, jobs: int, work: Path) -> dict[str, Any]:
    model, algorithms = load_model("embedded", "cpu", dtype), parse_algorithms(SPECS)
    dataset = open_dataset("world", {"prompts": str(prompts), "chunks": str(chunks)})
    by_codec: dict[str, Evaluation] = {}
    for codec in CODECS:
        run = RunOptions(output=work / f"codec_quality-{dtype}-{codec}.jsonl", jobs=jobs)
        by_codec[codec] = evaluate(model, Store(work), dataset, algorithms, SpecOptions(codec=codec), run)
        print(f"{codec}: {len(by_codec[codec].rows)} answers", flush=True)
    plain, rows = by_codec["none"], {codec: rows_of(done) for codec, done in by_codec.items()}
    groups = [number for number, unit in enumerate(plain.units) for _ in unit]
    labels = [one.label for one in algorithms if one != FULL]
    return {
        "machine": machine(), "model": plain.header.model, "dataset": plain.header.dataset, "questions": len(groups),
        "full": asdict(clustered_mean([score(row) for row in rows["none"][FULL.label]], groups)),
        "codecs": {
            codec: {label: compared(mine[label], rows["none"][label], groups) for label in labels}
            for codec, mine in rows.items()
        },
        "units": [len(unit) for unit in plain.units],
        "raw": {codec: {label: raw(mine[label]) for label in labels} for codec, mine in rows.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=90)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=Path, help="directory for objects and rows; what it has is not run again")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = given.work or Path(directory)
        found = measure(given.prompts, given.chunks, given.dtype, given.jobs, work)
    for codec, lines in found["codecs"].items():
        for label, one in lines.items():
            print(f"{codec:5} {label:14} {one['score']['mean']:.3f}", one["difference"], f"KL {one['kl']:.4f}")
    if given.out:
        given.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
