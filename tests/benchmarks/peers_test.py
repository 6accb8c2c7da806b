"""The prompts of `benchmarks.peers`, and what it says of peers that cannot run."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.peers.__main__ import PHASES, requests, summary
from benchmarks.peers.adapters import main
from pictool import load_model


def test_all_phases_have_the_same_documents_and_another_question() -> None:
    made = requests(load_model("embedded"), ["One page.\n", "Another.\n"], ["a", "b", "c"], random.Random(1))
    assert made["cold"]["documents"] == made["again"]["documents"] == made["moved"]["documents"][::-1]
    assert len({made[phase]["tail"] for phase in PHASES}) == 3


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    (tmp_path / "work.json").write_text("{}")
    assert main("sglang", str(tmp_path / "work.json"))["why"] == "sglang is not installed"


def test_a_ratio_is_that_of_one_repeat() -> None:
    def row(cold: float, again: float) -> dict[str, dict[str, object]]:
        seconds = dict(zip(PHASES, (cold, again, cold), strict=True))
        return {phase: {"seconds": took, "text": " x", "reused": None} for phase, took in seconds.items()}

    told = {"rows": [row(1.0, 0.5), row(10.0, 2.5), row(1.0, 0.1)]}
    found = summary(told, [dict.fromkeys(PHASES, "x")] * 3)
    assert found["again"] == {"median_s": 0.5, "cold_over_it": 4.0, "reused_tokens": None, "equal": 3}
