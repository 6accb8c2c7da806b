"""What every policy answers on held-out worlds: answers right, KL to full, rows; with the papers' ablations.

    python -m benchmarks.policy_quality --out benchmarks/results

The embedded model, 8 pages per prompt, up to three questions of each kind. Right: the whole greedy answer. KL: of the
first token's distribution from that of full recompute, in nats. Rows: mean share of context rows computed per layer.
Intervals: 95 %, bootstrap over prompts. The speculative model is `embedded-small` if nothing else is said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import bootstrap

from pictool import Chunk, Linked, Model, Policy, Sampling, Store, generate, link, load_model, make_policy
from pictool.engines.base import first_token_kl
from pictool.runtime.activations import hidden_norms
from pictool.runtime.machine import machine
from pictool.runtime.template import make_frame
from pictool.trace.deviation import attention_deviation, kv_deviation, neighbour_correlation
from pictool.trace.overlap import layer_overlap, model_overlap
from pictool.world.generate import KINDS, Shape, write_prompt
from training.score import HELD_OUT

RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30)
DEEP = {"all layers": 1.0, "last 2/3": 2 / 3, "last 1/3": 1 / 3, "last": 0.0}
Counts = list[list[float]]  # per kind: right, asked, sum of KL, sum of row shares


def configurations() -> dict[str, tuple[str, dict[str, Any]]]:
    """Label → policy and fields."""
    found: dict[str, tuple[str, dict[str, Any]]] = {"full": ("full", {}), "naive": ("naive", {})}
    found["legolink-0"] = ("legolink-0", {})
    for k in (1, 2, 4, 8, 16, 32):
        found[f"legolink-{k}"] = ("legolink", {"k": k})
    for ratio in RATIOS:
        share = {"ratio": ratio}
        name = f"{ratio:.0%}".rstrip("%")
        found[f"cacheblend-{name}"] = ("cacheblend", share)
        found[f"cacheblend-{name} single"] = ("cacheblend", {**share, "filter": "single"})
        found[f"speccache-{name}"] = ("speccache", share)
        found[f"speccache-{name} without spans"] = ("speccache", {**share, "max_span": 1})
    for ratio in (0.15, 0.30):
        found |= _ablations(ratio)
    return found


def _ablations(ratio: float) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared, and which layers of which model score; by the target itself: one that sees what it will do."""
    share, name = {"ratio": ratio}, f"{ratio:.0%}".rstrip("%")
    found: dict[str, tuple[str, dict[str, Any]]] = {
        f"cacheblend-{name} on K": ("cacheblend", {**share, "on": "k"}),
        f"cacheblend-{name} on K and V": ("cacheblend", {**share, "on": "kv"}),
    }
    for label, deep in DEEP.items():
        if label != "last 1/3":
            found[f"speccache-{name} {label}"] = ("speccache", {**share, "deep": deep})
        own = {**share, "deep": deep, "spec_model": "embedded"}
        found[f"speccache-{name} by the target itself, {label}"] = ("speccache", own)
    return found


@cache
def embedded() -> Model:
    torch.set_num_threads(1)
    return load_model("embedded", device="cpu")


def prompt_of(index: int, pages: int) -> Any:
    return write_prompt(random.Random(f"{HELD_OUT}-policies-{pages}-{index}"), pages, Shape())


def ask(index: int, pages: int, per_kind: int) -> dict[str, Counts]:
    """One prompt under every configuration."""
    model, prompt = embedded(), prompt_of(index, pages)
    chunks = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    policies = {label: make_policy(*one) for label, one in configurations().items()}
    counts = {label: [[0.0] * 4 for _ in KINDS] for label in policies}
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        for kind, name in enumerate(KINDS):
            for question in [q for q in prompt.questions if q.kind == name][:per_kind]:
                for label, row in _ask_all(model, store, chunks, question, policies).items():
                    counts[label][kind] = [a + b for a, b in zip(counts[label][kind], row, strict=True)]
    return counts


def _ask_all(
    model: Model, store: Store, chunks: list[Chunk], question: Any, policies: dict[str, Policy]
) -> dict[str, list[float]]:
    frame, full, rows = make_frame(model, question.text), None, {}
    for label, policy in policies.items():
        linked = link(model, store, chunks, frame.tail, policy, head=frame.head)
        logits = linked.image.logits
        assert logits is not None
        full = logits if full is None else full  # the first configuration
        text = generate(model, linked.image, 8, Sampling(stop=("\n",))).text
        share = linked.recomputed / linked.image.layout.num_context
        rows[label] = [float(text.strip() == question.answer), 1.0, first_token_kl(full, logits), share]
    return rows


def interval(values: NDArray[np.float64], asked: NDArray[np.float64]) -> list[float]:
    """95 % bootstrap interval of sum(values) / sum(asked), over prompts."""
    if not values.any():
        return [0.0, 0.0]
    done = bootstrap(
        (values, asked), lambda v, a, axis: v.sum(axis) / a.sum(axis), paired=True, vectorized=True,
        n_resamples=2000, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    return [round(float(bound), 4) for bound in (done.confidence_interval.low, done.confidence_interval.high)]


def summarise(raw: NDArray[np.float64]) -> dict[str, Any]:
    """Of one configuration's counts [prompts, kinds, 4]."""
    right, asked, kl, _ = raw.sum(1).T
    total = raw.sum((0, 1))
    return {
        "right": round(total[0] / total[1], 4), "right_interval": interval(right, asked),
        "kl": round(total[2] / total[1], 4), "kl_interval": interval(kl, asked),
        "rows": round(total[3] / total[1], 4), "questions": int(total[1]),
        "right_by_kind": {kind: round(float(a / b), 4) for kind, (a, b) in zip(KINDS, raw.sum(0)[:, :2], strict=True)},
    }  # fmt: skip


def statistics_of(index: int, pages: int) -> dict[str, Any]:
    """What the papers' insights rest on, measured on one prompt."""
    model, small, prompt = embedded(), load_model("embedded-small", device="cpu"), prompt_of(index, pages)
    chunks = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    frame = make_frame(model, prompt.questions[0].text)

    def run(algo: str, **fields: Any) -> Linked:
        return link(model, store, chunks, frame.tail, make_policy(algo, fields), head=frame.head)

    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        full, naive = run("full"), run("naive")
        blends = {f"{ratio:.0%}": run("cacheblend", ratio=ratio) for ratio in RATIOS}
        spec = run("speccache", ratio=0.2)
    layout = full.image.layout
    context, scores = slice(0, layout.num_context), spec.scores
    assert scores is not None
    norms = hidden_norms(model, layout.tokens)[:, context]
    deviation = kv_deviation(naive.image, full.image)
    last = norms[-2:].mean(0)  # the last third of four layers, rounded up
    assert small.geometry.layers == 3
    return {
        "attention_deviation": {
            "naive": attention_deviation(naive.image, full.image).mean,
            **{ratio: attention_deviation(one.image, full.image).mean for ratio, one in blends.items()},
        },
        "kv_deviation_by_layer": deviation.both[:, context].mean(1).tolist(),
        "cosine_distance_by_layer": deviation.cosine[:, context].mean(1).tolist(),
        "neighbour_correlation": neighbour_correlation(deviation.both[1:], (layout.chunks[1][0], layout.num_context))
        .layers.tolist(),
        "overlap_of_layer_0": layer_overlap(norms).first.tolist(),
        "overlap_of_models": model_overlap(scores[context], last).jaccard,
        "overlap_with_deviation": model_overlap(scores[context], deviation.both[1:, context].mean(0)).jaccard,
        "overlap_by_chance": model_overlap(last, last).chance,
    }  # fmt: skip


def mean_of(results: list[Any]) -> Any:
    """The mean of equal structures, number by number."""
    if isinstance(results[0], dict):
        return {name: mean_of([one[name] for one in results]) for name in results[0]}
    return np.round(np.nanmean(np.asarray(results, dtype=float), axis=0), 4).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for policy_quality.json")
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--per-kind", type=int, default=3, help="questions of each kind per prompt, at most")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        count = range(arguments.prompts)
        asked = pool.map(ask, count, [arguments.pages] * len(count), [arguments.per_kind] * len(count))
        raw = gather(asked)
        statistics = list(pool.map(statistics_of, count, [arguments.pages] * len(count)))
    results = {
        "command": f"python -m benchmarks.policy_quality --out {arguments.out} --pages {arguments.pages} "
        f"--prompts {arguments.prompts} --per-kind {arguments.per_kind}",
        "machine": machine(),
        "policies": {label: summarise(np.asarray(counts)) for label, counts in raw.items()},
        "fields": {label: {"algo": algo, **fields} for label, (algo, fields) in configurations().items()},
        "statistics": mean_of(statistics),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "policy_quality.json").write_text(json.dumps(results, indent=1) + "\n")
    for label, one in results["policies"].items():  # type: ignore[attr-defined]
        print(
            f"{label:45} right {one['right']:.3f} {one['right_interval']}  KL {one['kl']:.3f}  rows {one['rows']:.3f}"
        )


def gather(asked: Iterable[dict[str, Counts]]) -> dict[str, list[Counts]]:
    """Counts by configuration, of every prompt."""
    raw: dict[str, list[Counts]] = {label: [] for label in configurations()}
    for done, counts in enumerate(asked, 1):
        for label, one in counts.items():
            raw[label].append(one)
        print(f"\r{done} prompts", end="", flush=True)
    print()
    return raw


if __name__ == "__main__":
    main()
