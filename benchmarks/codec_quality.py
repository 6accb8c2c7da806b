"""Each codec × policy on held-out questions of the embedded model: score, and the paired difference to codec `none`.

    python -m benchmarks.codec_quality --out benchmarks/results/codec_quality.json

The dataset `world` (`benchmarks.questions`) is evaluated once for every codec, in a results file each (--work DIR
continues them). A question is compared with itself under the same policy and codec `none`: difference of scores, KL
of the first token's distribution from full recompute. Intervals: 95 %, bootstrap over prompts. `raw` has each
question's score, as a digit, and its KL in nats, in the order of `units`, the numbers of questions of each prompt.
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

from benchmarks.questions.world import World
from pictool import Store, load_model
from pictool.eval.cases import SpecOptions
from pictool.eval.evaluate import Evaluation, EvaluationOptions, evaluate
from pictool.eval.policies import FULL, parse_policies
from pictool.eval.results import CaseResult
from pictool.eval.statistics import clustered_mean
from pictool.runtime.machine import machine

CODECS = ("none", "zstd", "int8", "fp8", "int4")
ALGORITHMS = ("naive", "legolink-16", "cacheblend-15", "speccache-15")
ByLabel = dict[str, list[CaseResult]]  # in the order of the dataset


def by_label(evaluation: Evaluation) -> ByLabel:
    results: ByLabel = {algorithm.label: [] for algorithm in evaluation.policies}
    for result in evaluation.results:
        results[result.label].append(result)
    return results


def compare(coded: Sequence[CaseResult], plain: Sequence[CaseResult], groups: Sequence[int]) -> dict[str, Any]:
    """One policy's answers over coded objects, question by question beside those over plain ones."""
    assert [result.id for result in coded] == [result.id for result in plain]
    pairs = list(zip(coded, plain, strict=True))
    differences = [score(result) - score(other) for result, other in pairs]
    kls = [(result.kl or 0.0) - (other.kl or 0.0) for result, other in pairs]
    return {
        "score": asdict(clustered_mean([score(result) for result in coded], groups)),
        "difference": asdict(clustered_mean(differences, groups)),
        "lost": sum(difference < 0 for difference in differences),
        "won": sum(difference > 0 for difference in differences),
        "other_answer": sum(result.answer != other.answer for result, other in pairs),
        "kl": fmean(result.kl or 0.0 for result in coded), "kl_difference": asdict(clustered_mean(kls, groups)),
        "bytes_read": fmean(result.bytes_read for result in coded),
    }  # fmt: skip


def score(result: CaseResult) -> float:
    return result.scores[result.metric]


def raw(results: Sequence[CaseResult]) -> dict[str, Any]:
    return {
        "score": "".join(str(int(score(result))) for result in results),
        "kl": [float(f"{result.kl:.3g}") for result in results if result.kl is not None],
    }


def measure(prompts: int, chunks: int, dtype: str, work: Path) -> dict[str, Any]:
    model, algorithms = load_model("embedded", "cpu", dtype), parse_policies(ALGORITHMS)
    dataset = World(prompts=prompts, chunks=chunks)
    evaluations: dict[str, Evaluation] = {}
    for codec in CODECS:
        run = EvaluationOptions(output=work / f"codec_quality-{dtype}-{codec}.jsonl")
        evaluations[codec] = evaluate(model, Store(work), dataset, algorithms, SpecOptions(codec=codec), run)
        print(f"{codec}: {len(evaluations[codec].results)} answers", flush=True)
    plain, results = evaluations["none"], {codec: by_label(each) for codec, each in evaluations.items()}
    groups = [number for number, group in enumerate(plain.groups) for _ in group]
    labels = [algorithm.label for algorithm in algorithms if algorithm != FULL]
    full = [score(result) for result in results["none"][FULL.label]]
    return {
        "machine": machine(), "model": plain.header.model, "dataset": plain.header.dataset, "questions": len(groups),
        "full": asdict(clustered_mean(full, groups)),
        "codecs": {
            codec: {label: compare(coded[label], results["none"][label], groups) for label in labels}
            for codec, coded in results.items()
        },
        "units": [len(group) for group in plain.groups],
        "raw": {codec: {label: raw(coded[label]) for label in labels} for codec, coded in results.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=90)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--work", type=Path, help="directory for objects and results; what it has is not run again")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = options.work or Path(directory)
        results = measure(options.prompts, options.chunks, options.dtype, work)
    for codec, lines in results["codecs"].items():
        for label, line in lines.items():
            print(f"{codec:5} {label:14} {line['score']['mean']:.3f}", line["difference"], f"KL {line['kl']:.4f}")
    if options.out:
        options.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
