"""What `pic estimate` measures, computed in the plainest way: a suffix automaton, and sets of substrings."""

from __future__ import annotations

from collections.abc import Sequence


def prefixes(prompts: Sequence[bytes], block: int) -> list[int]:
    """Of each prompt, the units of whole blocks at its beginning that an earlier prompt begins with."""
    counts, known = [], set[bytes]()
    for prompt in prompts:
        starts = [prompt[:end] for end in range(block, len(prompt) + 1, block)]
        counts.append(next((i for i, start in enumerate(starts) if start not in known), len(starts)) * block)
        known.update(starts)
    return counts
