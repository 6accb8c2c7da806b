"""Does the policy that `pic tune` writes meet its target on fresh questions (docs/studies/tuning.md)?

    python -m benchmarks.tune_trials measure          # KL of every prompt under every policy → tune_trials.json
    python -m benchmarks.tune_trials trials           # the search on samples of them, judged on the others

Questions are about held-out prompts of each model's world, 6 chunks of about 20 tokens. A unit is a prompt, its value
the mean KL of its questions' first tokens. A trial draws four fifths of the prompts in a random order, searches as
`pic tune` does (the same rounds, chains, bounds and costs), and takes the mean over the others under the policy that
was chosen. One measured pool serves all trials, so their samples overlap.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fixup_zoo import DEFAULT, PER_KIND, RECIPES, Context, Signal, Subject, exact_rows, signal
from benchmarks.fixups import Answers, questions_of
from benchmarks.output import write_results
from pictool import Chunk, Model
from pictool.bench.shapes import random_model
from pictool.engines.base import first_token_kl
from pictool.linker.policies.base import count_of, first_rows, highest
from pictool.runtime.sensitivity import probes_of
from pictool.tuning.questions import normalised_cross_entropy
from pictool.tuning.search import TargetStatus, cheapest, judge, worth_measuring
from pictool.tuning.tune import MAX_SURPRISE, TuningTarget, next_round
from training.world.generate import BOOKS
from training.zoo import ZOO

RESULTS = Path("benchmarks/results/tune_trials.json")
RANDOM = "random qwen2.5-0.5b"
FIXUPS, STARTS = (0.4, 0.2, 0.1, 0.05, 0.02), (16, 4)
PROMPTS = {"embedded": 800, "qwen3": 600, "phi3": 1200, RANDOM: 40}
TARGETS = (0.02, 0.05, 0.1, 0.2)
TRIALS = 20
Record = dict[str, Any]


class RandomSubject(Subject):
    """A random model of a shape, on the prompts of the embedded world."""

    @cached_property
    def model(self) -> Model:
        return random_model("qwen2.5-0.5b", "cpu", "float32")


def subject_of(name: str) -> Subject:
    if name == RANDOM:
        return RandomSubject(name, BOOKS, "")
    return Subject(name, BOOKS if name == "embedded" else ZOO[name].world, "")


def measure_prompt(subject: Subject, index: int, is_random: bool) -> Iterator[tuple[str, float, float]]:
    """Label, mean KL and share of rows of one prompt, under every policy."""
    model, world = subject.model, subject.prompt(20, 50_000 + index)
    pages = [Chunk(page, model.encode(page), "page") for page in world.pages]
    context = Context(model, pages, questions_of(world, 1 if is_random else PER_KIND))
    layout, exact = context.layout, exact_rows(context.layout)
    nothing = np.zeros(layout.num_context, dtype=bool)
    full = context.answers(~nothing)
    rows = {"naive": nothing} | {f"legolink-{k}": first_rows(layout, k) for k in STARTS}
    if not is_random:
        scores = scores_of(model, pages, layout.head[1], exact)
        rows |= {f"fixup-{100 * ratio:g}": highest(scores, count_of(ratio, len(scores))) & ~exact for ratio in FIXUPS}
    for label, chosen in rows.items():
        yield label, divergence(full, context.answers(chosen)), float(chosen.mean())


def scores_of(model: Model, pages: Sequence[Chunk], head: int, exact: Any) -> Any:
    """The tables of the pages, one after the other, -inf where rows are exact."""
    probes = probes_of(model, 8, 60)
    each = [signal(model, probes, page.tokens) for page in pages]
    joined = {
        "own": Signal(*(np.concatenate([getattr(one, name) for one in each]) for name in ("highest", "mean", "new")))
    }
    scores = np.concatenate([np.full(head, -np.inf), RECIPES[DEFAULT](joined)])
    scores[exact] = -np.inf
    return scores


def divergence(full: Answers, own: Answers) -> float:
    """The mean KL of the questions' first tokens."""
    pairs = zip(full.first, own.first, strict=True)
    return float(np.mean([first_token_kl(exact, linked) for exact, linked in pairs]))


def measure(options: argparse.Namespace) -> None:
    """Every model's pool; what the results have is kept."""
    torch.set_num_threads(1)
    results: Record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    results["command"] = "python -m benchmarks.tune_trials measure; python -m benchmarks.tune_trials trials"
    for name in options.models:
        subject = subject_of(name)
        of_model = results["models"].setdefault(name, {"kl": {}, "rows": {}, "prompts": 0})
        texts = [page for index in range(8) for page in subject.prompt(20, index).pages]
        of_model["surprise"] = round(normalised_cross_entropy(subject.model, texts), 3)
        while of_model["prompts"] < PROMPTS[name]:
            with torch.inference_mode():
                for label, kl, share in measure_prompt(subject, of_model["prompts"], name == RANDOM):
                    of_model["kl"].setdefault(label, []).append(float(f"{kl:.4g}"))
                    of_model["rows"].setdefault(label, []).append(round(share, 4))
            of_model["prompts"] += 1
            if of_model["prompts"] % 20 == 0 or of_model["prompts"] == PROMPTS[name]:
                write_results(RESULTS, results)
                print(name, of_model["prompts"], file=sys.stderr, flush=True)


def search(pool: Mapping[str, Any], order: Sequence[int], limit: float) -> tuple[str | None, int]:
    """The policy that is chosen, None if it is unclear, and how many units were measured."""
    starts = [f"legolink-{k}" for k in STARTS if f"legolink-{k}" in pool["kl"]]
    fixups = [f"fixup-{100 * ratio:g}" for ratio in FIXUPS if f"fixup-{100 * ratio:g}" in pool["kl"]]
    chains = [chain for chain in (["naive"], starts, fixups) if chain]
    values: dict[str, Any] = {}
    wanted, units = [label for chain in chains for label in chain], 0
    while True:
        units = next_round(units, len(order))
        for label in wanted:
            values[label] = np.array(pool["kl"][label])[list(order[:units])]
        bounds, means = (
            TuningTarget("answer_kl", limit).range(False),
            {label: float(kl.mean()) for label, kl in values.items()},
        )
        clipped = {label: np.minimum(kl, bounds.high) for label, kl in values.items()}
        found = judge(chains, clipped, limit, bounds, means=means)
        costs = {label: float(np.mean(np.array(pool["rows"][label])[list(order[:units])])) for label in values}
        wanted = worth_measuring(chains, found, costs)
        if not wanted or units == len(order):
            break
    if (chosen := cheapest(found, costs)) is not None:
        return chosen, units
    is_clear = all(finding.status in (TargetStatus.FAILS, TargetStatus.BLOCKED) for finding in found.values())
    return ("full" if is_clear else None), units


def trials(_: argparse.Namespace) -> None:
    """Twenty searches for each model and target, judged on prompts that the search did not see."""
    results: Record = json.loads(RESULTS.read_text())
    print(
        "| model | target KL | chosen (times) | prompts, median | fresh KL, mean | meets |\n|---|---|---|---|---|---|"
    )
    results["trials"] = []
    for name, pool in results["models"].items():
        for limit in TARGETS:
            done = []
            for trial in range(TRIALS):
                order = list(range(pool["prompts"]))
                random.Random(f"trial {trial}").shuffle(order)
                drawn = len(order) * 4 // 5
                chosen, units = search(pool, order[:drawn], limit)
                fresh = None
                if chosen is not None:
                    fresh = 0.0 if chosen == "full" else float(np.mean(np.array(pool["kl"][chosen])[order[drawn:]]))
                done.append({"chosen": chosen, "units": units, "fresh": fresh})
            results["trials"].append({"model": name, "target": limit, "trials": done})
            print(row_of(name, limit, done))
        claim = "possible" if pool["surprise"] < MAX_SURPRISE else "not possible"
        print(f"{name}: surprise {pool['surprise']:.2f} of a guess's, claim on answers {claim}", file=sys.stderr)
    write_results(RESULTS, results)


def row_of(name: str, limit: float, done: Sequence[Record]) -> str:
    """A row of the table."""
    counts = {str(each["chosen"]): sum(other["chosen"] == each["chosen"] for other in done) for each in done}
    chosen = ", ".join(f"{'nothing' if label == 'None' else label} ({times})" for label, times in counts.items())
    fresh = [each["fresh"] for each in done if each["fresh"] is not None]
    mean = f"{np.mean(fresh):.3f}" if fresh else "-"
    good = sum(value <= limit for value in fresh)
    units = np.median([each["units"] for each in done])
    return f"| {name} | {limit} | {chosen} | {units:.0f} | {mean} | {good} of {len(fresh)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("measure")
    command.add_argument("models", nargs="*", default=list(PROMPTS), help="all by default")
    command.set_defaults(run=measure)
    commands.add_parser("trials").set_defaults(run=trials)
    options: Any = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
