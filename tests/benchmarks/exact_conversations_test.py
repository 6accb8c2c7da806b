"""The study of exact conversations with fewer requests: each answer is that of `transformers`, and no block leaks."""

from __future__ import annotations

from benchmarks.exact_conversations import run


def test_answers_are_those_of_transformers_whatever_happens() -> None:
    found = run(40, seed=1)
    assert (found["different"], found["leaked"]) == (0, 0) and found["requests"] >= 40
    assert all(found[count] > 0 for count in ("restarts", "forks", "vanished", "evicted_tokens"))
    assert found["prefix_tokens"] > found["prompt_tokens"] // 2
