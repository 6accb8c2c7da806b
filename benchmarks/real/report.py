"""What was measured as tables, and the worst prompts of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pictool.eval.statistics import ratio_interval

BASELINE = "naive@none"
KINDS = ("passages", "pieces", "long", "chapters", "code", "records", "tasks")
ALL = "all"  # kinds but tasks
PLANTED = "tasks"

Prompts = Sequence[Mapping[str, Any]]
Table = Mapping[str, Mapping[str, Any]]


def summary(done: Prompts) -> dict[str, Any]:
    """By kind and in all, and by policy: what is left of naive's KL, and what became of answers."""
    groups = {kind: [each for each in done if each["kind"] == kind] for kind in KINDS}
    groups[ALL] = [each for each in done if each["kind"] != PLANTED]
    return {kind: group_summary(own) for kind, own in groups.items() if own}


def group_summary(own: Prompts) -> dict[str, Any]:
    with_gold = [each for each in own if each["gold"]]
    return {
        "prompts": len(own), "tokens": float(np.mean([each["tokens"] for each in own])),
        "naive_nats": float(np.mean([nats(each, BASELINE) for each in own])),
        "full_right": [sum(each["right"] for each in with_gold), len(with_gold)],
        "full_ttft_s": float(np.median([each["full_ttft_s"] for each in own])),
        "seconds": float(np.mean([each["seconds"] for each in own])),
        "policies": {label: row(own, label) for label in own[0]["policies"]},
    }  # fmt: skip


def row(own: Prompts, label: str) -> dict[str, Any]:
    found, naive = [nats(each, label) for each in own], [nats(each, BASELINE) for each in own]
    low, high = ratio_interval(np.asarray(found), np.asarray(naive)) if len(own) > 1 else (None, None)
    results = [each["policies"][label] for each in own]
    sure = [each for each in own if each["right"]]
    timed = [each["full_ttft_s"] / each["policies"][label]["ttft_s"] for each in own if label != "again"]
    return {
        "left": sum(found) / sum(naive), "low": low, "high": high, "worst_nats": max(found),
        "same": float(np.mean([each["same"] for each in results])),
        "right": [sum(each["policies"][label]["right"] for each in sure), len(sure)],
        "rows": float(np.mean([each["rows"] for each in results])),
        "speedup": float(np.median(timed)) if timed else None,
    }  # fmt: skip


def nats(each: Mapping[str, Any], label: str) -> float:
    return float(sum(each["policies"][label]["kl"]))


def text_lines(table: Table) -> Iterator[str]:
    """The summary for a terminal."""
    for kind, group in table.items():
        right, known = group["full_right"]
        yield (
            f"{kind}: {group['prompts']} prompts of {group['tokens']:.0f} tokens, {group['seconds']:.0f} s each; naive "
            f"{group['naive_nats']:.2f} nats an answer; right {right} of {known}, TTFT {group['full_ttft_s']:.2f} s"
        )
        for label, own in group["policies"].items():
            right, sure = own["right"]
            yield (
                f"  {label:24} {share(own):18} worst {own['worst_nats']:6.2f}  rows {100 * own['rows']:3.0f} %  same "
                f"{100 * own['same']:3.0f} %  right {right:2} of {sure:2}  {speedup(own)}"
            ).rstrip()


def markdown_lines(table: Table) -> Iterator[str]:
    """Policies by kinds: the share of naive's KL that is left. Rows and equal answers are of all kinds but tasks."""
    kinds = [kind for kind in table if kind != ALL]
    longest = max(kinds, key=lambda kind: float(table[kind]["tokens"]))
    heads = [f"{kind} ({table[kind]['prompts']})" for kind in table]
    yield f"| policy | rows | {' | '.join(heads)} | equal answers | tasks right | TTFT, {longest} |"
    yield "|---" * (len(heads) + 5) + "|"
    nats = [f"{group['naive_nats']:.2f} nats" for group in table.values()]
    yield f"| naive's KL | | {' | '.join(nats)} | | | {table[longest]['full_ttft_s']:.1f} s under full |"
    for label, own in table[ALL]["policies"].items():
        cells = [share(group["policies"][label]) for group in table.values()]
        right = table[PLANTED]["policies"][label]["right"] if PLANTED in table else None
        yield (
            f"| {label} | {100 * own['rows']:.0f} % | {' | '.join(cells)} | {100 * own['same']:.0f} % | "
            f"{'' if right is None else f'{right[0]} of {right[1]}'} | {speedup(table[longest]['policies'][label])} |"
        )


def share(own: Mapping[str, Any]) -> str:
    """The share of naive's KL with its interval; the order of magnitude of one that is next to nothing."""
    if 0 < own["left"] < 0.0005:
        return f"{own['left']:.0e}"
    bounds = "" if own["low"] is None else f" [{own['low']:.2f}, {own['high']:.2f}]"
    return f"{own['left']:.2f}{bounds}"


def speedup(own: Mapping[str, Any]) -> str:
    return "" if own["speedup"] is None else f"{own['speedup']:.1f} ×"


def worst_lines(done: Prompts, label: str, count: int = 3) -> Iterator[str]:
    """The prompts on which a policy's KL is largest, with the nats at each token of full's answer."""
    for each in sorted(done, key=lambda each: -nats(each, label))[:count]:
        found = each["policies"][label]
        yield f"{label} on {each['kind']} {each['id']}: {nats(each, label):.2f} nats; naive {nats(each, BASELINE):.2f}"
        yield f"  query: {each['query']}" + (f" …{each['begin']}" if each["begin"] else "")
        yield f"  full:  {each['answer']!r}" + (f"  (right: {each['gold']!r})" if each["gold"] else "")
        yield f"  own:   {found['answer']!r}"
        tokens = zip(each["answer_tokens"], found["kl"], strict=True)
        yield "  nats:  " + " ".join(f"{token!r} {kl:.2f}" for token, kl in tokens)
