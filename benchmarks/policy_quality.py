"""What every policy answers on held-out worlds, with the papers' ablations; and what the papers' insights rest on.

    python -m benchmarks.policy_quality --out benchmarks/results

Answers are an evaluation of the dataset `world` (`benchmarks.questions`), with the embedded model: score, KL to full,
rows. The speculative model is `embedded-small` if nothing else is said. Statistics are means over the first question
of every prompt: deviation of attention and of KV, correlation of neighbours, overlap of layers and of models.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.output import write_results
from benchmarks.overlap import layer_overlap, model_overlap
from benchmarks.questions.world import World
from pictool import Linked, Model, Store, load_model
from pictool.eval.cases import PreparedCase, SpecOptions, group_cases
from pictool.eval.datasets.base import Dataset
from pictool.eval.evaluate import EvaluationOptions, evaluate
from pictool.eval.policies import parse_policies
from pictool.eval.summary import summarise
from pictool.linker.grid import parse_grid
from pictool.linker.link import link
from pictool.runtime.activations import hidden_norms
from pictool.trace.deviation import attention_deviation, kv_deviation

RATIOS = "0.05,0.1,0.15,0.2,0.3"
DEEP = "1,0.6666,0"  # all layers of the second model, the last two thirds, the last one; a third is the default
ALGORITHMS = (
    "full", "naive", "legolink:k=1,2,4,8,16,32", f"cacheblend:ratio={RATIOS}",
    f"cacheblend:ratio={RATIOS}:filter=single", "cacheblend:ratio=0.15,0.3:on=k,kv", f"speccache:ratio={RATIOS}",
    f"speccache:ratio={RATIOS}:max_span=1", f"speccache:ratio=0.15,0.3:deep={DEEP}",
    f"speccache:ratio=0.15,0.3:deep={DEEP},0.3333:spec_model=embedded",
)  # fmt: skip


def answers(model: Model, store: Store, dataset: Dataset, output: Path | None) -> dict[str, Any]:
    """The table of `pic eval`, as JSON."""
    run = EvaluationOptions(output=output)
    evaluation = evaluate(
        model, store, dataset, parse_policies(ALGORITHMS), run=run,
        on_progress=lambda done, total: print(f"\r{done} of {total} answers", end="", flush=True),
    )  # fmt: skip
    return summarise(evaluation).report()


def statistics_of(model: Model, store: Store, case: PreparedCase) -> dict[str, Any]:
    """What the papers' insights rest on, measured on one prompt."""

    def run(name: str) -> Linked:
        (labelled,) = parse_grid([name])
        return link(model, store, replace(case.spec, policy=labelled.policy))

    full, naive, speccache = run("full"), run("naive"), run("speccache-20")
    layout, scores = full.image.layout, speccache.scores
    context = slice(0, layout.num_context)
    assert scores is not None
    norms = hidden_norms(model, layout.tokens)[:, context]
    deviation = kv_deviation(naive.image, full.image)
    deep = norms[-2:].mean(0)  # the last third of four layers, rounded up
    chunk_tokens = layout.chunks[1][0], layout.num_context
    blends = {ratio: run(f"cacheblend:ratio={ratio}") for ratio in RATIOS.split(",")}
    return {
        "attention_deviation": {
            name: attention_deviation(linked.image, full.image).mean
            for name, linked in {"naive": naive, **blends}.items()
        },
        "kv_deviation_by_layer": deviation.both[:, context].mean(1).tolist(),
        "cosine_distance_by_layer": deviation.cosine[:, context].mean(1).tolist(),
        "neighbour_correlation": neighbour_correlation(deviation.both[1:, slice(*chunk_tokens)]),
        "overlap_of_layer_0": layer_overlap(norms).first.tolist(),
        "overlap_of_models": model_overlap(scores[context], deep).jaccard,
        "overlap_with_deviation": model_overlap(scores[context], deviation.both[1:, context].mean(0)).jaccard,
        "overlap_by_chance": model_overlap(deep, deep).chance,
    }


def neighbour_correlation(deviation: NDArray[np.float32]) -> list[float]:
    """Spearman's rank correlation of the tokens' deviation [layers, n] between layers (CacheBlend §4.3)."""
    return [float(spearmanr(upper, lower).statistic) for upper, lower in itertools.pairwise(deviation)]


def mean_of(results: Sequence[Any]) -> Any:
    """The mean of equal structures, number by number."""
    if isinstance(results[0], dict):
        return {name: mean_of([result[name] for result in results]) for name in results[0]}
    return np.round(np.nanmean(np.asarray(results, dtype=float), axis=0), 4).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for policy_quality.json")
    parser.add_argument("--chunks", type=int, default=8, help="pages of every prompt")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--per-kind", type=int, default=3, help="questions of each kind per prompt, at most")
    parser.add_argument("--results", type=Path, help="the results file of the evaluation, which is continued")
    options = parser.parse_args()
    model = load_model("embedded", device="cpu")
    dataset = World(prompts=options.prompts, chunks=options.chunks, per_kind=options.per_kind)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        summary = answers(model, store, dataset, options.results)
        groups = group_cases(model, dataset.cases(), SpecOptions()).groups
        statistics = mean_of([statistics_of(model, store, group.cases[0]) for group in groups])
    write_results(options.out / "policy_quality.json", {"answers": summary, "statistics": statistics})
    for line in summary["lines"]:
        kl = line["kl"]["mean"] if line["kl"] else float("nan")
        print(f"{line['label']:45} right {line['score']['mean']:.3f}  KL {kl:.3f}  rows {line['row_share']:.3f}")


if __name__ == "__main__":
    main()
