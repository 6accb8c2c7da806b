"""Does the guarantee of `pic serve` fail as rarely as it says, and what does it cost? Simulated streams of answers.

    python -m benchmarks.guarantee    # → guarantee.json (minutes)

Each stream has 480 answers under the policies that the guarantee chooses; a stronger policy leaves a quarter of the
KL. *violated*: streams in which, at any time, a window is said to hold while its true mean is above the limit, with a
99 % interval (Clopper and Pearson). *delay*: answers from the shift (the 240th) to the
fall back to exact, median of the streams that were linked then. *linked*: the
share of answers that were linked. *served*: their mean KL. *verified*: the share that was verified.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from benchmarks.output import write_results
from pictool.fidelity import guarantee
from pictool.fidelity.guarantee import Guarantee, Guarantor, Window
from pictool.linker.policies import make_policy

RESULTS = Path("benchmarks/results/guarantee.json")
DECLARED = Guarantee(kl=0.1, level=0.95, share=0.5)
ANSWERS, SHIFT = 480, 240


class TrueWindow(Window):
    """A window that knows the truth."""

    value, is_violated = 0.0, False  # of the answer that is counted now; whether any window ever claimed too much

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.total, self.seen, self.count = 0.0, 0.0, 0

    def add(self, probability: float, value: float | None) -> None:
        super().add(probability, value)
        self.total, self.count, self.seen = self.total + TrueWindow.value, self.count + 1, self.seen + (value or 0.0)
        if self.total > self.limit * self.count and self.holds:
            TrueWindow.is_violated = True


Source = Callable[[random.Random, int, Any], float]  # of a stream's random numbers, the answer's index and its class


def steady(mean: float, worst: float = 1.0) -> Source:
    return lambda rng, index, of: worst if rng.random() < mean / worst else 0.0


def shifted(rng: random.Random, index: int, of: Any) -> float:
    """Documents change kind: from 0.005 to 0.3 in the mean."""
    return float(rng.random() < (0.005 if index < SHIFT else 0.3))


def degrading(rng: random.Random, index: int, of: Any) -> float:
    """A model that gets worse and worse: every answer loses, 0.4 nats in the end."""
    return 0.8 * rng.random() * max(0, index - SHIFT) / SHIFT


def adversary(rng: random.Random, index: int, of: Any) -> float:
    """Wrong answers as long as the coins have missed more than their share of them."""
    window = of and of._window
    is_lucky = window is not None and window.seen <= DECLARED.share * window.total
    return float(is_lucky and rng.random() < 0.3)


STREAMS: dict[str, Source] = {
    "good": steady(0.005), "at the limit": steady(0.101), "small losses at the limit": steady(0.101, 0.202),
    "shifted": shifted, "degrading": degrading, "adversary": adversary,
}  # fmt: skip


def run_stream(source: Source, seed: int) -> dict[str, float]:
    """One stream; every chosen answer is verified at once."""
    rng, policy = random.Random(f"stream {seed}"), make_policy("fixup", {"ratio": 0.1})
    guarantor = Guarantor(DECLARED, lambda text: None, coin=random.Random(f"coin {seed}").random)
    TrueWindow.is_violated, was_linked = False, False
    served, linked, verified, delay = 0.0, 0, 0, float("inf")
    for index in range(ANSWERS):
        of = next(iter(guarantor.classes.values()), None)
        ticket = guarantor.draw("t", policy, 4)
        assert ticket is not None
        TrueWindow.value = source(rng, index, of) / 4**ticket.strength
        if index == SHIFT:
            was_linked = not ticket.is_exact
        if ticket.is_exact:
            delay = min(delay, index - SHIFT) if index >= SHIFT else delay
        else:
            linked, served = linked + 1, served + TrueWindow.value
        verified += ticket.is_chosen
        guarantor.finish(ticket)
        if ticket.is_chosen:
            guarantor.verify(ticket, TrueWindow.value)
    return {
        "violated": TrueWindow.is_violated, "linked": linked / ANSWERS, "served": served / max(1, linked),
        "verified": verified / ANSWERS, "delay": delay if was_linked else float("nan"),
    }  # fmt: skip


def simulate(name: str, count: int) -> dict[str, Any]:
    """Many streams of one kind."""
    guarantee.Window = TrueWindow  # type: ignore[assignment, misc]
    try:
        streams = [run_stream(STREAMS[name], seed) for seed in range(count)]
    finally:
        guarantee.Window = Window  # type: ignore[assignment, misc]
    violated = sum(bool(stream["violated"]) for stream in streams)
    interval = binomtest(violated, count).proportion_ci(0.99)
    means = {
        key: round(float(np.mean([stream[key] for stream in streams])), 4) for key in ("linked", "served", "verified")
    }
    delays = [stream["delay"] for stream in streams if not np.isnan(stream["delay"])]
    delay = float(np.median(delays)) if delays else float("inf")
    return {
        "streams": count, "violated": violated / count, "interval": [round(interval.low, 5), round(interval.high, 5)],
        **means, "delay": None if delay == float("inf") else delay, "linked_at_shift": len(delays) / count,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000, help="in all")
    count = parser.parse_args().streams // len(STREAMS) + 1
    declared, found = {**vars(DECLARED), "answers": ANSWERS, "shift": SHIFT}, dict[str, Any]()
    for name in STREAMS:
        found[name] = simulate(name, count)
        print(name, found[name], flush=True)
        write_results(RESULTS, {"command": "python -m benchmarks.guarantee", "declared": declared, "streams": found})


if __name__ == "__main__":
    main()
