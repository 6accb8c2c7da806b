"""Does the policy that `pic tune` writes meet its target on fresh questions (docs/studies/tuning.md)?

    python -m benchmarks.tune_trials        # the search on samples of recorded prompts, judged on the others

The KL of every prompt under every policy was recorded by version 0.3, whose policy fixup has left: held-out prompts of
each model's world, 6 chunks of about 20 tokens. A unit is a prompt, its value the mean KL of its questions' first
tokens. A trial draws four fifths of the prompts in a random order, searches as
`pic tune` does (the same rounds, chains, bounds and costs), and takes the mean over the others under the policy that
was chosen. One measured pool serves all trials, so their samples overlap.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import write_results
from pictool.tuning.search import TargetStatus, cheapest, judge, worth_measuring
from pictool.tuning.tune import MAX_SURPRISE, TuningTarget, next_round

RESULTS = Path("benchmarks/results/tune_trials.json")
FIXUPS, STARTS = (0.4, 0.2, 0.1, 0.05, 0.02), (16, 4)
TARGETS = (0.02, 0.05, 0.1, 0.2)
TRIALS = 20
Record = dict[str, Any]


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


def main() -> None:
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


if __name__ == "__main__":
    main()
