"""What became of each part of a prompt, and why: the field `parts` of `pic`, and the reasons that are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pictool.linker.policies.base import Policy
from pictool.serve.work import Linking, PromptPart


def explain(
    num_tokens: int,
    reused: Iterable[PromptPart],
    linking: Linking,
    policy: Policy,
    least: int,
    problem: bool = False,
) -> tuple[PromptPart, ...]:
    """All parts of a prompt: those that are given, and what is computed between them.

    Args:
        reused: parts with an object, those that an earlier request computed, and marked texts that could not be stored.
        least: tokens of a document that is recognised.
        problem: whether all of the prompt is computed because an object cannot be used.
    """
    if problem:
        return (PromptPart(0, num_tokens, "problem"),)
    parts, at = list[PromptPart](), 0
    for part in (*sorted(reused, key=lambda part: part.start), PromptPart(num_tokens, num_tokens, "")):
        if at < part.start:
            parts.append(PromptPart(at, part.start, _reason(part.start - at, linking, policy, least)))
        if part.start < part.end:
            parts.append(part)
        at = part.end
    return tuple(parts)


def _reason(num_tokens: int, linking: Linking, policy: Policy, least: int) -> str:
    if not policy.needs.objects:
        return "policy"
    if not linking.recognises:
        return "not_searched"
    return "too_short" if num_tokens < least else "no_object"


def summary(parts: Iterable[PromptPart]) -> str:
    """A line for the log: tokens by what became of them, the most first."""
    counts = Counter[str]()
    for part in parts:
        counts[f"{part.state} ({part.reason})"] += part.end - part.start
    return ", ".join(f"{tokens:,d} {name}" for name, tokens in counts.most_common())
