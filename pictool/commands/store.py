"""`pic store`: list, check, prune and move objects. Needs no model and no torch, unless texts are compared."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import output_path, print_json
from pictool.commands.console.progress import progress
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count, show_age, show_size
from pictool.commands.settings.options import JsonOption, argument, command, make_app, option
from pictool.commands.settings.resources import find_intact, open_existing, open_model, open_store
from pictool.commands.settings.settings import DEFAULT, Settings
from pictool.commands.settings.types import one_of, parse_age, parse_size
from pictool.errors import InputError, ObjectError
from pictool.escapes import visible
from pictool.reading import exists

if TYPE_CHECKING:
    from pictool.compiler.recompute import Recomputed
    from pictool.store.entries import Entry
    from pictool.store.remote.transfer import TransferResult
    from pictool.store.sources import Source
    from pictool.store.store import Store, StoredObject
    from pictool.store.upkeep import StoreStats, VerifyResult


app = make_app("List, verify, prune, sign and move objects.")


# What is there


SORTS = ("key", "used", "size")
ALL = "all"  # in place of keys


@command(app, "ls", "store")
def run_ls(
    settings: Settings,
    limit: Annotated[Optional[int], option("--limit", "N", "List at most N objects.", min=1)] = None,
    sort: Annotated[
        str,
        option("--sort", "ORDER", "Sort by key, used (latest first) or size (largest first).", type=one_of(SORTS)),
    ] = "key",
    chains: Annotated[bool, option("--chains", None, "Also list the blocks of prefix chains.")] = False,
    counts: Annotated[
        bool, option("--stats", None, "Print totals instead: objects, bytes, hits, misses, synced folders.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List objects with size, age, last use and source; or count them.

    \b
      pic store ls --stats
      pic store ls --sort used --limit 20
    """
    from pictool.store.eviction import pinned
    from pictool.store.sources import read_sources

    store = open_existing(settings)
    if counts:
        show_stats(store, as_json)
        return
    listed, num_objects = _listed(store, chains, sort, limit)
    pins, sources = pinned(store.root), read_sources(store.root, on_problem=note)
    if as_json:
        print_json([object_json(entry, sources.get(entry.key), entry.key in pins) for entry in listed])
        return
    if listed:
        _print_objects(listed, sources, pins)
    num_bytes = sum(entry.num_bytes for entry in listed)
    of_all = f"{len(listed):,d} of " if len(listed) < num_objects else ""
    note(f"{of_all}{count(num_objects, 'object')}, {show_size(num_bytes)}{' listed' if of_all else ''}")


def list_folders(store: Store) -> list[dict[str, Any]]:
    """The folders that `pic sync` keeps in step, each with its files and objects that are there."""
    from pictool.store.folders import read_folders

    files, folders = store.files(), dict[str, dict[str, Any]]()
    for row in read_folders(store.root):
        found = folders.setdefault(row.folder, {"files": set(), "objects": 0, "bytes": 0})
        if (entry := files.get(row.key)) is not None:
            found["files"].add(row.path)
            found["objects"] += 1
            found["bytes"] += entry.num_bytes
    return [{"folder": name} | found | {"files": len(found["files"])} for name, found in sorted(folders.items())]


def _listed(store: Store, chains: bool, sort: str, limit: int | None) -> tuple[list[StoredObject], int]:
    """The first `limit` objects in an order, and how many there are."""
    if sort == "key" and limit is not None:
        objects = store.objects(chains=chains)
        first = list(islice(objects, limit))
        return first, len(first) + sum(1 for _ in objects)
    listed = list(store.objects(chains=chains))
    if sort != "key":
        listed.sort(key=lambda entry: -(entry.used_ns if sort == "used" else entry.num_bytes))
    return listed[:limit], len(listed)


def _print_objects(objects: Sequence[StoredObject], sources: Mapping[str, Source], pins: Container[str]) -> None:
    from rich.text import Text

    from pictool.commands.console.terminal import open_screen, table

    rows, now = [], time.time()
    for entry in objects:
        source = sources.get(entry.key)
        text = " ".join(entry.text.split())[:200]
        named = "… " if entry.is_block else "" if source is None else f"{source.source}: "
        rows.append([
            entry.key[:12] + ("*" if entry.key in pins else ""),
            "" if entry.meta is None else str(entry.meta.num_tokens),
            show_size(entry.num_bytes),
            show_age(now - entry.used_ns / 1e9),
            "" if source is None else Path(source.model).name[:16],
            f"{named}{text}" if entry.problem is None else "DAMAGED or unreadable: see below",
        ])  # fmt: skip
    columns = ["key", "tokens", "size", "used", "model", "from: text"]
    screen = open_screen()
    screen.print(table(columns, rows, left=(0, 5)))
    if any(row[0].endswith("*") for row in rows):
        screen.print(Text("* is pinned", style="dim"))
    for entry in objects:
        if entry.problem is not None:
            print(visible(f"{entry.key[:12]}: {entry.problem}"))


def object_json(entry: StoredObject, source: Source | None = None, is_pinned: bool = False) -> dict[str, Any]:
    """An object as `pic store ls --json` lists it."""
    known: dict[str, Any] = {} if source is None else {"source": source.source, "model": source.model}
    if entry.meta is not None:
        meta = entry.meta
        known |= {"tokens": meta.num_tokens, "before": meta.num_before, "codec": meta.codec, "text": entry.text}
        known |= {"parent": meta.parent} if entry.is_block else {}
    return {
        "key": entry.key, "bytes": entry.num_bytes, "path": str(entry.path), "problem": entry.problem,
        "used": entry.used_ns / 1e9, "pinned": is_pinned, **known,
    }  # fmt: skip


def show_stats(store: Store, as_json: bool) -> None:
    """Count objects and bytes, hits and misses."""
    from pictool.store.upkeep import stats

    report, folders = stats(store), list_folders(store)
    if as_json:
        print_json(asdict(report) | {"counts": report.counts.report(), "folders": folders})
        return
    lines = _stats_lines(report) + [
        (f"folder {each['folder']}", f"{each['files']} files, {each['objects']}, {show_size(each['bytes'])}")
        for each in folders
    ]
    width = max(len(name) for name, _ in lines) + 2
    for name, value in lines:
        print(f"{visible(name):<{width}}{visible(value)}")


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


@command(app, "verify", "store", "model", "device", "dtype", "require_signed")
def run_verify(
    settings: Settings,
    repair: Annotated[
        bool, option("--repair", None, "Remove damaged objects, and those under another one's name.")
    ] = False,
    recompute: Annotated[
        Optional[float],
        option(
            "--recompute",
            "SHARE",
            "Recompute this share of the objects, and remove those that differ.",
            min=0,
            max=1,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read and check every byte of every object. With -m, also compare texts with their tokens.

    \b
      pic store verify --repair
      pic store verify --recompute 0.05 -m MODEL
    """
    from pictool.store.upkeep import verify

    if recompute is not None and repair:
        raise UsageError("--recompute: cannot be combined with --repair")
    store, check = open_existing(settings), None
    if recompute is not None:
        from pictool.compiler.recompute import choose
        from pictool.compiler.recompute import recompute as recompute_objects

        keys = find_intact(store, chains=False)
        with progress("recomputing", len(choose(keys, recompute))) as advance:
            found = recompute_objects(open_model(settings), store, keys, recompute, advance)
        print_recomputed(found, store, as_json)
        return
    if settings.origin("model") != DEFAULT:
        from pictool.compiler.chunking import require_own_text

        check = partial(require_own_text, open_model(settings))
    result = verify(store, repair, check=check)
    if as_json:
        print_json({
            "objects": result.objects, "damaged": result.problems, "repaired": list(result.repaired),
            "unsigned": list(result.unsigned),
        })  # fmt: skip
    else:
        _print_problems(result)
    if left := len(result.problems) - len(result.repaired):
        remedy = "check their permissions" if repair else "remove them with --repair, and compile their texts again"
        raise ObjectError(f"{store.root}: {left} of {result.objects} objects are damaged; {remedy}")


def _print_problems(result: VerifyResult) -> None:
    if result.unsigned:
        note(f"{count(len(result.unsigned), 'object')} without a trusted signature, ignored by links")
    for key, problem in result.problems.items():
        print(visible(problem) + ("  (removed)" if key in result.repaired else ""))
    if not result.problems:
        note(f"{count(result.objects, 'object')} checked, none damaged")
    elif len(result.repaired) == len(result.problems):
        note(f"{count(result.objects, 'object')} checked, {len(result.repaired)} removed; compile their texts again")


def print_recomputed(
    found: Recomputed, store: Store, as_json: bool, report: Mapping[str, Any] | None = None
) -> None:  # fmt: skip
    """Print what was found, with what else is to be reported. Raises ObjectError if an object differs."""
    from pictool.compiler.recompute import require_right

    if as_json:
        print_json({**(report or {}), "recomputed": found.objects} | asdict(found))
    else:
        for problem in found.problems.values():
            print(visible(problem))
        for writer, (num_checked, num_bad) in sorted(found.writers.items()):
            note(f"signed by {writer}: {num_bad} of {count(num_checked, 'recomputed object')} differ")
        note(f"{count(found.objects, 'object')} recomputed, {found.skipped} skipped (other models, or chains)")
    require_right(found, store)


# Who made it: signatures


@command(app, "sign", "store", "signing_key")
def run_sign(
    settings: Settings,
    names: Annotated[
        Optional[list[str]],
        argument("NAME", "Keys or unique prefixes of keys, all, or files such as archives and manifests."),
    ] = None,
) -> None:
    """Sign objects that you made or checked, and whole files. Without a NAME: print the public key that others trust;
    if there is no private key, make one.

    \b
      pic store sign
      pic store sign all
      pic store sign all.kva
    """
    from pictool.store.signatures import SigningKey, path_of, sign_file, sign_object_file

    file = path_of(settings.signing_key, "signing-key")
    if not names:
        print(public_key(file))
        return
    key, store = SigningKey.read(file), open_store(settings)
    for name in names:
        if name != ALL and Path(name).is_file():
            (sign_object_file if name.endswith(".kvo") else sign_file)(key, Path(name))
            continue
        for found in find_intact(open_existing(settings), chains=False) if name == ALL else [store.resolve(name)]:
            sign_object_file(key, store.path(found), store.root / "tmp")
    note(f"signed by {key.public}")


def public_key(file: Path) -> str:
    """The public key of the private one in a file, which is made if there is none."""
    from pictool.store.signatures import SigningKey

    if file.exists():
        return SigningKey.read(file).public
    note(f"{file}: new private key, keep it secret; others trust the public key (pic store trust NAME KEY)")
    return SigningKey.new(file).public


@command(app, "trust", "require_signed")
def run_trust(
    settings: Settings,
    name: Annotated[Optional[str], argument("NAME", "Your name for the signer.")] = None,
    key: Annotated[Optional[str], argument("KEY", "Its public key (ed25519:…).")] = None,
    revoke: Annotated[
        Optional[str], option("--revoke", "NAME", "Stop trusting a signer and everything it signed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Trust a signer, revoke one, or list all.

    \b
      pic store trust build-server ed25519:6d1f…
      pic store trust --revoke build-server
    """
    from pictool.store.signatures import Signers, path_of

    if (name is None) != (key is None) or (name and revoke):
        raise UsageError("trust: needs NAME and KEY, or --revoke NAME, or nothing to list the signers")
    path = path_of(settings.require_signed, "signers")
    if not name and not revoke:
        signers = Signers.read(path)
    else:
        signers = Signers.change(
            path, lambda them: them.trust(name, key) if name and key else them.revoke(revoke or ""), name is not None
        )
    if as_json:
        print_json({"path": str(signers.path), "trusted": signers.trusted, "revoked": signers.revoked})
        return
    for known, state in ((signers.trusted, ""), (signers.revoked, "  revoked")):
        for public, own in known.items():
            print(visible(f"{public}  {own}{state}"))


# What is removed, and what stays


def print_plan(objects: Sequence[Entry], files: Sequence[str], as_json: bool) -> None:
    """Print what would be removed; nothing was."""
    num_bytes = sum(entry.num_bytes for entry in objects)
    if as_json:
        print_json({"dry_run": True, "objects": [entry.key for entry in objects], "bytes": num_bytes, "files": files})
        return
    now = time.time()
    for entry in objects:
        print(f"{entry.key[:12]}  {show_size(entry.num_bytes):>9}  used {show_age(now - entry.used_ns / 1e9)} ago")
    for path in files:
        print(visible(path))
    note(
        f"dry run: {count(len(objects), 'object')} ({show_size(num_bytes)}) and {count(len(files), 'file')} "
        "would be removed"
    )


@command(app, "gc", "store")
def run_gc(
    settings: Settings,
    keys: Annotated[Optional[list[str]], argument("KEY", "Objects to remove: keys or unique prefixes of keys.")] = None,
    max_size: Annotated[
        Optional[int],
        option(
            "--max-size",
            "SIZE",
            "Evict the least recently used objects beyond SIZE, such as 10G (PIC_MAX_SIZE).",
            type=parse_size,
        ),
    ] = None,
    older_than: Annotated[
        Optional[float],
        option("--older-than", "AGE", "Remove objects that were not used for AGE, such as 12h or 30d.", type=parse_age),
    ] = None,
    force: Annotated[bool, option("--force", None, "Remove the named objects even if they are pinned.")] = False,
    dry_run: Annotated[bool, option("--dry-run", None, "Print what would be removed, and remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove stale temporary files; with a size, evict the least recently used objects; or remove some by key or age.

    \b
      pic store gc --max-size 10G --dry-run
      pic store gc --older-than 30d
    """
    if sum(value is not None for value in (keys or None, max_size, older_than)) > 1:
        raise UsageError("gc: use one of keys, --max-size and --older-than")
    store = open_existing(settings)
    if keys or older_than is not None:
        remove(store, [store.resolve(key) for key in keys or ()], older_than, force, dry_run, as_json)
    else:
        collect(store, max_size, dry_run, as_json)


def collect(store: Store, max_bytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove stale files, and objects beyond a size."""
    from pictool.store.upkeep import gc, would_collect

    if dry_run:
        stale, evicted = would_collect(store, max_bytes)
        print_plan(evicted, [str(path) for path in stale], as_json)
        return
    done = gc(store, max_bytes)
    if as_json:
        print_json(asdict(done))
    else:
        note(
            f"{count(done.evicted.count, 'object')} evicted ({show_size(done.evicted.num_bytes)}), "
            f"{count(done.litter.count, 'stale temp file')} removed; {show_size(done.num_bytes)} left"
        )


def remove(
    store: Store, named: Sequence[str], seconds: float | None, force: bool, dry_run: bool, as_json: bool
) -> None:  # fmt: skip
    """Remove objects by key; if `seconds` is not None, those that were not used for so long."""
    from pictool.store.upkeep import expire, expire_older, would_expire, would_expire_older

    if dry_run:
        planned = would_expire(store, named, force) if seconds is None else would_expire_older(store, seconds)
        print_plan(planned, [], as_json)
        return
    done = expire(store, named, force) if seconds is None else expire_older(store, seconds)
    if as_json:
        print_json(asdict(done))
    else:
        note(f"{count(done.count, 'object')} removed, {show_size(done.num_bytes)}")


@command(app, "pin", "store")
def run_pin(
    settings: Settings,
    keys: Annotated[list[str], argument("KEY", "Keys or unique prefixes of keys.")],
    undo: Annotated[bool, option("--undo", None, "Unpin: allow eviction and removal again.")] = False,
) -> None:
    """Protect objects from eviction and removal.

    \b
      pic store pin 3f9a
    """
    from pictool.store.upkeep import pin, unpin

    store = open_existing(settings)
    for key in [store.resolve(key) for key in keys]:
        (unpin if undo else pin)(store, key)
    note(f"{count(len(keys), 'object')} {'unpinned' if undo else 'pinned'}")


# What moves: archives, and a remote


@command(app, "push", "store", "remote", "signing_key")
def run_push(
    settings: Settings,
    keys: Annotated[list[str], argument("KEY", "Keys, unique prefixes of keys, or all.")],
    archive: Annotated[Optional[str], option("-o, --output", "FILE", "Write an archive (tar.zst) instead.")] = None,
    force: Annotated[bool, option("--force", None, "Overwrite existing objects or archives.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send objects to the remote, or write them to an archive. Prefix chains are in archives only.

    \b
      pic store push all --remote s3://bucket/store
      pic store push all -o all.kva
    """
    if archive == "-":
        raise UsageError("-o -: archives cannot be written to stdout; specify a file")
    if archive is not None and not force and Path(archive).is_file():
        raise InputError(f"{archive}: already exists; replace it with --force, or choose another file")
    store = open_existing(settings)
    is_all = keys == [ALL]
    named = find_intact(store, chains=archive is not None) if is_all else [store.resolve(key) for key in keys]
    if archive is not None:
        write_archive(store, named, archive, as_json)
        return
    from pictool.store.remote.transfer import push

    with progress("pushing", len(named)) as advance:
        done = push(store, named, advance, force)
    _print_transferred(done, "sent", "there", as_json)


def write_archive(store: Store, keys: Sequence[str], archive: str, as_json: bool) -> None:
    """Write objects to an archive."""
    from pictool.store.objects.bundles import export_archive

    path = output_path("-o", archive, [store.path(key) for key in keys])
    with progress("exporting", len(keys)) as advance:
        size = export_archive(store, keys, path, lambda _: advance())
    if as_json:
        print_json({"path": archive, "objects": len(set(keys)), "bytes": size})
    else:
        note(f"{count(len(set(keys)), 'object')}, {show_size(size)}")


@command(app, "pull", "model", "device", "dtype", "store", "remote", "require_signed")
def run_pull(
    settings: Settings,
    names: Annotated[list[str], argument("NAME", "Whole keys, or one archive.")],
    check: Annotated[
        Optional[float],
        option(
            "--check",
            "SHARE",
            "Recompute this share of the fetched objects before they enter the store.",
            min=0,
            max=1,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch objects from the remote, or add those of an archive.

    \b
      pic store pull KEY --remote https://host/store
      pic store pull all.kva
    """
    from pictool.store.objects.bundles import import_archive
    from pictool.store.remote.transfer import pull

    store = open_store(settings)
    if len(names) == 1 and (exists(names[0]) or not set(names[0]) <= set("0123456789abcdef")):
        if check is not None:
            raise UsageError(
                "--check: applies to remotes only; check an archive's objects with pic store verify --recompute"
            )
        added = import_archive(store, Path(names[0]))
        if as_json:
            print_json(asdict(added))
        else:
            note(f"{count(len(added.keys), 'object')}, {len(added.new)} of them new")
    elif check is None:
        with progress("pulling", len(names)) as advance:
            done = pull(store, names, advance)
        _print_transferred(done, "fetched", "here", as_json)
    else:
        from pictool.compiler.recompute import pull_checked

        with progress("pulling", len(names)) as advance:
            done, found = pull_checked(open_model(settings), store, names, check, advance)
        print_recomputed(found, store, as_json, asdict(done))


def _print_transferred(done: TransferResult, verb: str, where: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
    else:
        note(
            f"{count(len(done.keys), 'object')} {verb} ({show_size(done.num_bytes)}), "
            f"{len(done.present)} already {where}"
        )
