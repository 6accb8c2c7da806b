"""`pic store`: list, check, prune and move objects. Needs no model and no torch."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.errors import UsageError
from pictool.commands.options import JsonOption, argument, command, make_app, option
from pictool.commands.outputs import note, output_path, print_json
from pictool.commands.progress import progress
from pictool.commands.resources import open_store
from pictool.commands.settings import Settings
from pictool.commands.sizes import parse_age, parse_size, show_size
from pictool.errors import ObjectError, PicError, UnreadableObjectError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.store.store import Store, StoredObject
    from pictool.store.transfer import Transferred
    from pictool.store.upkeep import StoreStats, Verified

ALL = "all"  # in place of keys
KeysArgument = Annotated[list[str], argument("KEY", "Keys, or their beginnings.")]

app = make_app("List, check, prune and move the objects of a store.")


# What is there


@command(app, "ls", "store")
def run_ls(
    settings: Settings,
    limit: Annotated[Optional[int], option("--limit", "N", "List N objects at most.", min=1)] = None,
    after: Annotated[str, option("--after", "KEY", "List those after this key.")] = "",
    chains: Annotated[bool, option("--chains", None, "List blocks of prefix chains, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the objects, by key.

    \b
      pic store ls --limit 20
    """
    objects = islice(open_store(settings).objects(after, chains), limit)
    if as_json:
        print_json([object_json(entry) for entry in objects])
        return
    count, num_bytes = 0, 0
    for entry in objects:
        count, num_bytes = count + 1, num_bytes + entry.num_bytes
        print(_line(entry))
    note(f"{count} objects, {num_bytes:,d} bytes")


def _line(entry: StoredObject) -> str:
    if entry.meta is None:
        return f"{entry.key[:12]}  DAMAGED  {visible(entry.problem or '')}"
    text = ("…" if entry.is_block else "") + visible(" ".join(entry.text.split())[:48])
    return f"{entry.key[:12]}  {entry.meta.num_tokens:6d} tokens  {entry.num_bytes:>11,d} bytes  {text}"


def object_json(entry: StoredObject) -> dict[str, Any]:
    """An object as `pic store ls --json` lists it."""
    known: dict[str, Any] = {}
    if entry.meta is not None:
        meta = entry.meta
        known = {"tokens": meta.num_tokens, "sinks": meta.sinks, "codec": meta.codec, "text": entry.text}
        known |= {"parent": meta.parent} if entry.is_block else {}
    return {
        "key": entry.key, "bytes": entry.num_bytes, "path": str(entry.path), "problem": entry.problem,
        "used": entry.used_ns / 1e9, **known,
    }  # fmt: skip


@command(app, "show", "store")
def run_show(settings: Settings, keys: KeysArgument, as_json: JsonOption = False) -> None:
    """Show objects: what they are, their text, when they were used.

    \b
      pic store show 3f9a 81c2
    """
    from pictool.commands.inspect import describe
    from pictool.store.eviction import pinned

    store = open_store(settings)
    pins, shown = pinned(store.root), []
    for key in map(store.resolve, keys):
        path = store.path(key)
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        shown.append(describe(path) | {"used": used, "pinned": key in pins})
    if as_json:
        print_json(shown)
        return
    for values in shown:
        for name, value in values.items():
            print(f"{name:<13}{visible(' '.join(value.split()) if name == 'text' else str(value))}")


@command(app, "stats", "store")
def run_stats(settings: Settings, as_json: JsonOption = False) -> None:
    """Count objects and bytes, hits and misses.

    \b
      pic store stats --json
    """
    from pictool.store.upkeep import stats

    report = stats(open_store(settings))
    if as_json:
        print_json(asdict(report) | {"counts": report.counts.report()})
        return
    for name, value in _stats_lines(report):
        print(f"{name:<14}{visible(value)}")


def _stats_lines(stats: StoreStats) -> list[tuple[str, str]]:
    counts = stats.counts
    rate = "" if counts.hit_rate is None else f" ({counts.hit_rate:.1%})"
    size = show_size(stats.num_bytes) + (f" of {show_size(stats.max_bytes)}" if stats.max_bytes is not None else "")
    groups = [("model " + name[:12], group) for name, group in stats.by_model.items()]
    groups += [("codec " + name, group) for name, group in stats.by_codec.items()]
    return [
        ("objects", f"{stats.objects}, {size}"),
        ("of chains", f"{stats.chains.count}, {show_size(stats.chains.num_bytes)}"),
        ("pinned", str(stats.pinned)),
        ("damaged", str(stats.damaged)),
        ("hits", f"{counts.hits} of {counts.hits + counts.misses}{rate}, {show_size(counts.hit_bytes)}"),
        ("written", f"{counts.writes}, {show_size(counts.written_bytes)}"),
        ("evicted", f"{counts.evictions}, {show_size(counts.evicted_bytes)}"),
        *((name, f"{group.count}, {show_size(group.num_bytes)}") for name, group in groups),
    ]


# Whether it is whole


@command(app, "verify", "store")
def run_verify(
    settings: Settings,
    repair: Annotated[bool, option("--repair", None, "Remove damaged objects.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every object and check it.

    \b
      pic store verify --repair
    """
    from pictool.store.upkeep import verify

    store = open_store(settings)
    result = verify(store, repair)
    if as_json:
        print_json({"objects": result.objects, "damaged": result.problems, "repaired": list(result.repaired)})
    else:
        _print_problems(result)
    if left := len(result.problems) - len(result.repaired):
        remedy = "see who may read them" if repair else "take them out with --repair, and compile again"
        raise ObjectError(f"{store.root}: {left} of {result.objects} objects are damaged; {remedy}")


def _print_problems(result: Verified) -> None:
    for key, problem in result.problems.items():
        print(visible(problem) + ("  (taken out)" if key in result.repaired else ""))
    if not result.problems:
        note(f"{result.objects} objects read, none damaged")
    elif len(result.repaired) == len(result.problems):
        note(f"{result.objects} objects read, {len(result.repaired)} damaged ones taken out; compile their texts again")


# What is removed, and what stays


@command(app, "gc", "store")
def run_gc(
    settings: Settings,
    max_size: Annotated[
        Optional[str], option("--max-size", "SIZE", "Evict least recently used objects beyond it: 10G (PIC_MAX_SIZE).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what killed writers left; keep a size.

    \b
      pic store gc --max-size 10G
    """
    from pictool.store.upkeep import gc

    done = gc(open_store(settings), None if max_size is None else parse_size("--max-size", max_size))
    if as_json:
        print_json(asdict(done))
    else:
        note(
            f"{done.evicted.count} objects evicted ({show_size(done.evicted.num_bytes)}), {done.litter.count} temp "
            f"files of killed writers removed; {show_size(done.num_bytes)} stay"
        )


@command(app, "expire", "store")
def run_expire(
    settings: Settings,
    keys: Annotated[Optional[list[str]], argument("KEY", "Keys, or their beginnings.")] = None,
    older_than: Annotated[
        Optional[str], option("--older-than", "AGE", "Remove those not used for so long: 12h, 30d.")
    ] = None,
    force: Annotated[bool, option("--force", None, "Remove pinned ones, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove objects, by key or by age.

    \b
      pic store expire --older-than 30d
    """
    if bool(keys) == (older_than is not None):
        raise UsageError("expire: name keys, or give --older-than; one of the two")
    from pictool.store.upkeep import expire, expire_older

    store = open_store(settings)
    if older_than is not None:
        done = expire_older(store, parse_age("--older-than", older_than))
    else:
        done = expire(store, [store.resolve(key) for key in keys or ()], force)
    if as_json:
        print_json(asdict(done))
    else:
        note(f"{done.count} objects removed, {show_size(done.num_bytes)}")


@command(app, "pin", "store")
def run_pin(settings: Settings, keys: KeysArgument) -> None:
    """Keep objects from being evicted or expired.

    \b
      pic store pin 3f9a
    """
    from pictool.store.upkeep import pin

    store = open_store(settings)
    for key in [store.resolve(key) for key in keys]:
        pin(store, key)
    note(f"{len(keys)} objects pinned")


@command(app, "unpin", "store")
def run_unpin(settings: Settings, keys: KeysArgument) -> None:
    """Let pinned objects go again.

    \b
      pic store unpin 3f9a
    """
    from pictool.store.upkeep import unpin

    store = open_store(settings)
    for key in [store.resolve(key) for key in keys]:
        unpin(store, key)
    note(f"{len(keys)} objects unpinned")


# What moves: archives, and a remote


@command(app, "export", "store")
def run_export(
    settings: Settings,
    archive: Annotated[str, argument("ARCHIVE", "File to write (a tar in zstd).")],
    keys: Annotated[Optional[list[str]], argument("KEY", "Keys, or their beginnings; none: all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write objects to an archive.

    \b
      pic store export all.kva
    """
    from pictool.store.bundles import export_archive

    store = open_store(settings)
    exported = [store.resolve(key) for key in keys] if keys else _intact(store, chains=True)
    path = output_path("export", archive, [store.path(key) for key in exported])
    with progress("exporting", len(exported)) as advance:
        size = export_archive(store, exported, path, lambda _: advance())
    if as_json:
        print_json({"path": archive, "objects": len(set(exported)), "bytes": size})
    else:
        note(f"{len(set(exported))} objects, {show_size(size)}")


def _intact(store: Store, chains: bool) -> list[str]:
    """The keys of all objects but those whose headers are damaged, which are named.

    Raises:
        UnreadableObjectError: whether one is damaged cannot be told.
    """
    keys = []
    for entry in store.objects(chains=chains):
        try:
            if entry.problem is not None:
                store.peek_local(entry.key).close()
            keys.append(entry.key)
        except UnreadableObjectError:
            raise
        except PicError as error:
            note(f"left out: {error}")
    return keys


@command(app, "import", "store")
def run_import(
    settings: Settings,
    archive: Annotated[str, argument("ARCHIVE", "An archive that export wrote.")],
    as_json: JsonOption = False,
) -> None:
    """Add the objects of an archive.

    \b
      pic store import all.kva
    """
    from pictool.store.bundles import import_archive

    done = import_archive(open_store(settings), Path(archive))
    if as_json:
        print_json(asdict(done))
    else:
        note(f"{len(done.keys)} objects, {len(done.new)} of them new")


@command(app, "push", "store", "remote")
def run_push(
    settings: Settings,
    keys: Annotated[list[str], argument("KEY", "Keys, or their beginnings; or all.")],
    force: Annotated[bool, option("--force", None, "Send also what is there already.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send objects to the remote.

    \b
      pic store push all --remote s3://bucket/store
    """
    from pictool.store.transfer import push

    store = open_store(settings)
    is_all = keys == [ALL]  # but for blocks of prefix chains, which no store asks a remote for
    pushed = _intact(store, chains=False) if is_all else [store.resolve(key) for key in keys]
    with progress("pushing", len(pushed)) as advance:
        done = push(store, pushed, advance, force)
    _print_transferred(done, "sent", "there", as_json)


@command(app, "pull", "store", "remote")
def run_pull(
    settings: Settings, keys: Annotated[list[str], argument("KEY", "Whole keys.")], as_json: JsonOption = False
) -> None:
    """Fetch objects from the remote.

    \b
      pic store pull KEY --remote https://host/store
    """
    from pictool.store.transfer import pull

    with progress("pulling", len(keys)) as advance:
        done = pull(open_store(settings), keys, advance)
    _print_transferred(done, "fetched", "here", as_json)


def _print_transferred(done: Transferred, verb: str, where: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
    else:
        note(f"{len(done.keys)} objects {verb} ({show_size(done.num_bytes)}), {len(done.present)} were {where} already")
