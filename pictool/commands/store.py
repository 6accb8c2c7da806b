"""`pic store ls|show|verify|stats`: what the store holds, and whether it is whole. Needs no model and no torch."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import islice
from typing import Any

from pictool.commands.common import note, open_store, print_json
from pictool.commands.inspect_object import describe
from pictool.commands.units import show_size
from pictool.errors import ObjectError
from pictool.store.eviction import pinned
from pictool.store.store import StoredObject
from pictool.store.upkeep import StoreStats, Verified, stats, verify


def run_ls(*, store: str | None, limit: int | None, after: str, chains: bool, as_json: bool) -> None:
    objects = islice(open_store(store).objects(after, chains), limit)
    if as_json:
        print_json([row(one) for one in objects])
        return
    count, num_bytes = 0, 0
    for one in objects:
        count, num_bytes = count + 1, num_bytes + one.num_bytes
        print(line(one))
    note(f"{count} objects, {num_bytes:,d} bytes")


def line(one: StoredObject) -> str:
    if one.meta is None:
        return f"{one.key[:12]}  DAMAGED  {one.problem}"
    text = ("…" if one.is_block else "") + " ".join(one.text.split())[:48]
    return f"{one.key[:12]}  {one.meta.num_tokens:6d} tokens  {one.num_bytes:>11,d} bytes  {text}"


def row(one: StoredObject) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if one.meta is not None:
        known = {"tokens": one.meta.num_tokens, "sinks": one.meta.sinks, "codec": one.meta.codec, "text": one.text}
        known |= {"parent": one.meta.parent} if one.is_block else {}
    used = {"used": one.used_ns / 1e9}
    return {"key": one.key, "bytes": one.num_bytes, "path": str(one.path), "problem": one.problem, **used, **known}


def run_show(keys: list[str], *, store: str | None, as_json: bool) -> None:
    opened = open_store(store)
    kept, shown = pinned(opened.root), []
    for key in map(opened.resolve, keys):
        path = opened.path(key)
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        shown.append(describe(path) | {"used": used, "pinned": key in kept})
    if as_json:
        print_json(shown)
        return
    for one in shown:
        for field, value in one.items():
            print(f"{field:<13}{' '.join(str(value).split()) if field == 'text' else value}")


def run_verify(*, store: str | None, repair: bool, as_json: bool) -> None:
    """Read and check every object; a PicError at the end if any is damaged, and stays."""
    opened = open_store(store)
    found = verify(opened, repair)
    if as_json:
        print_json({"objects": found.objects, "damaged": found.problems, "repaired": list(found.repaired)})
    else:
        report_problems(found)
    if left := len(found.problems) - len(found.repaired):
        remedy = "see who may read them" if repair else "take them out with --repair, and compile again"
        raise ObjectError(f"{opened.root}: {left} of {found.objects} objects are damaged; {remedy}")


def report_problems(found: Verified) -> None:
    for key, problem in found.problems.items():
        print(problem + ("  (taken out)" if key in found.repaired else ""))
    if not found.problems:
        note(f"{found.objects} objects read, none damaged")
    elif len(found.repaired) == len(found.problems):
        note(f"{found.objects} objects read, {len(found.repaired)} damaged ones taken out; compile their texts again")


def run_stats(*, store: str | None, as_json: bool) -> None:
    found = stats(open_store(store))
    if as_json:
        print_json(asdict(found) | {"counts": found.counts.report()})
        return
    for name, value in stats_lines(found):
        print(f"{name:<14}{value}")


def stats_lines(found: StoreStats) -> list[tuple[str, str]]:
    counts = found.counts
    rate = "" if counts.hit_rate is None else f" ({counts.hit_rate:.1%})"
    size = show_size(found.num_bytes) + (f" of {show_size(found.max_bytes)}" if found.max_bytes is not None else "")
    groups = [("model " + name[:12], one) for name, one in found.by_model.items()]
    groups += [("codec " + name, one) for name, one in found.by_codec.items()]
    return [
        ("objects", f"{found.objects}, {size}"),
        ("of chains", f"{found.chains.count}, {show_size(found.chains.num_bytes)}"),
        ("pinned", str(found.pinned)),
        ("damaged", str(found.damaged)),
        ("hits", f"{counts.hits} of {counts.hits + counts.misses}{rate}, {show_size(counts.hit_bytes)}"),
        ("written", f"{counts.writes}, {show_size(counts.written_bytes)}"),
        ("evicted", f"{counts.evictions}, {show_size(counts.evicted_bytes)}"),
        *((name, f"{one.count}, {show_size(one.num_bytes)}") for name, one in groups),
    ]
