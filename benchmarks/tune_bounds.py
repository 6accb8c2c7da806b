"""Which bound certifies a mean with the fewest questions, and does it fail as rarely as it says?

    python -m benchmarks.tune_bounds    # recorded KL of tune_trials.json → tune_bounds.json (minutes)

Values are the KL of a prompt's first tokens under a policy: as recorded, clipped at 1 nat, or less a tenth of naive's
on the same prompt. *needed*: the median look (32, 64, 128, ...) over shuffled orders at which the bound shows the mean
to be below the limit, where the pool's mean is at most a third of it (to naive: below it). *failures*: draws with
replacement
from a pool, so that its mean is the truth; a bound fails if it is below that at any look. Levels are of one claim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from benchmarks.output import write_results
from pictool.tuning.bounds import log_capital_below

POOLS = Path("benchmarks/results/tune_trials.json")
RESULTS = Path("benchmarks/results/tune_bounds.json")
LEVEL, LOOKS, CLIP, SHARE = 0.05, (32, 64, 128, 256, 512), 1.0, 0.1
ORDERS, DRAWS = 40, 1000
Values = NDArray[np.float64]


def mixture(values: Values, limit: float) -> bool:
    """The bounds of `pic tune`: a mixture of constant bets."""
    return bool(log_capital_below(values, limit, 0.0, 1.0) >= -np.log(LEVEL))


def agrapa(values: Values, limit: float) -> bool:
    """Betting with aGRAPA's predictable bets (Waudby-Smith and Ramdas §B.3), truncated at 3/4; at the looks."""
    count = np.arange(1, len(values) + 1)
    mean = np.concatenate([[0.5], (0.5 + np.cumsum(values)) / (count + 1)])[:-1]
    before = np.concatenate([[0.25], (0.25 + np.cumsum((values - mean) ** 2)) / (count + 1)])[:-1]
    bets = np.clip((limit - mean) / (before + (limit - mean) ** 2), 0, 0.75 / (1 - limit))
    return bool(np.log1p(-bets * (values - limit)).sum() >= -np.log(LEVEL))


def bernstein(values: Values, limit: float) -> bool:
    """Maurer and Pontil, theorem 4, at a fifth of the level for each of the five looks."""
    n, log = len(values), np.log(2 * len(LOOKS) / LEVEL)
    return bool(values.mean() + np.sqrt(2 * values.var(ddof=1) * log / n) + 7 * log / (3 * (n - 1)) <= limit)


BOUNDS: dict[str, Callable[[Values, float], bool]] = {"mixture": mixture, "agrapa": agrapa, "bernstein": bernstein}


def forms(pool: dict[str, Any], label: str, limit: float) -> Iterator[tuple[str, Values, float]]:
    """The recorded values of a policy scaled to 0…1, and the limit, in each of three forms."""
    kl, naive = (np.array(pool["kl"][name]) for name in (label, "naive"))
    highest = max(2 * limit, *(max(each) for each in pool["kl"].values()))
    yield "recorded", kl / highest, limit / highest
    yield "clipped", np.minimum(kl, CLIP) / CLIP, limit / CLIP
    low = SHARE * naive.max()
    yield "to naive", (kl - SHARE * naive + low) / (highest + low), low / (highest + low)


def needed(values: Values, limit: float, shows: Callable[[Values, float], bool]) -> float:
    """The median look at which the bound shows it; inf: at none."""
    rng, found = np.random.default_rng(1), list[float]()
    looks = [look for look in LOOKS if look <= len(values)]
    for _ in range(ORDERS):
        order = rng.permutation(values)
        found.append(next((float(look) for look in looks if shows(order[:look], limit)), np.inf))
    return float(np.median(found))


def failures(values: Values, shows: Callable[[Values, float], bool]) -> dict[str, Any]:
    """How often the bound is below the mean, with its binomial interval."""
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(DRAWS):
        drawn = rng.choice(values, LOOKS[-1])
        wrong += any(shows(drawn[:look], float(values.mean())) for look in LOOKS)
    interval = binomtest(wrong, DRAWS).proportion_ci(0.99)
    return {"share": wrong / DRAWS, "low": round(interval.low, 4), "high": round(interval.high, 4)}


def main() -> None:
    pools, rows, failed = json.loads(POOLS.read_text())["models"], list[dict[str, Any]](), list[dict[str, Any]]()
    for name, pool in pools.items():
        if pool["prompts"] < LOOKS[-1]:
            continue
        for label in pool["kl"]:
            for limit in (0.05, 0.1, 0.2):
                for form, values, at in forms(pool, label, limit):
                    if values.mean() > (at if form == "to naive" else at / 3) or (form == "to naive" and limit > 0.05):
                        continue
                    looks = {bound: needed(values, at, shows) for bound, shows in BOUNDS.items()}
                    found = {key: None if np.isinf(look) else look for key, look in looks.items()}
                    rows.append({"model": name, "policy": label, "limit": limit, "values": form, "needed": found})
            for form, values, _ in forms(pool, label, 0.05):
                if label in ("fixup-10", "fixup-20", "naive"):
                    of = {bound: failures(values, shows) for bound, shows in BOUNDS.items()}
                    failed.append({"model": name, "policy": label, "values": form, "failures": of})
    command = "python -m benchmarks.tune_bounds"
    write_results(RESULTS, {"command": command, "level": LEVEL, "needed": rows, "failures": failed})
    for row in rows:
        print(row["model"], row["policy"], row["limit"], row["values"], row["needed"])
    for bound in BOUNDS:
        print(bound, "worst failure", max(row["failures"][bound]["share"] for row in failed))


if __name__ == "__main__":
    main()
