"""`pic store gc|expire|pin|unpin|export|import`: what changes a store. Needs no model and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pictool.commands.common import UsageError, note, open_store, print_json
from pictool.commands.outputs import output_path
from pictool.commands.progress import progress
from pictool.commands.units import parse_age, parse_size, show_size
from pictool.store import upkeep as life
from pictool.store.bundles import export_archive, import_archive


def run_gc(*, store: str | None, max_size: str | None, as_json: bool) -> None:
    done = life.gc(open_store(store), None if max_size is None else parse_size("--max-size", max_size))
    if as_json:
        print_json(asdict(done))
    else:
        note(
            f"{done.evicted.count} objects evicted ({show_size(done.evicted.num_bytes)}), {done.litter.count} temp "
            f"files of killed writers removed; {show_size(done.num_bytes)} stay"
        )


def run_expire(keys: Sequence[str], *, store: str | None, older_than: str | None, force: bool, as_json: bool) -> None:
    if bool(keys) == (older_than is not None):
        raise UsageError("expire: name keys, or give --older-than; one of the two")
    opened = open_store(store)
    if older_than is not None:
        done = life.expire_older(opened, parse_age("--older-than", older_than))
    else:
        done = life.expire(opened, [opened.resolve(key) for key in keys], force)
    if as_json:
        print_json(asdict(done))
    else:
        note(f"{done.count} objects removed, {show_size(done.num_bytes)}")


def run_pin(keys: Sequence[str], *, store: str | None, is_on: bool) -> None:
    opened = open_store(store)
    for key in [opened.resolve(key) for key in keys]:
        (life.pin if is_on else life.unpin)(opened, key)
    note(f"{len(keys)} objects {'pinned' if is_on else 'unpinned'}")


def run_export(output: str, keys: Sequence[str], *, store: str | None, as_json: bool) -> None:
    opened = open_store(store)
    wanted = [opened.resolve(key) for key in keys] if keys else opened.keys()
    path = output_path("export", output, [opened.path(key) for key in wanted])
    with progress("exporting", len(wanted)) as advance:
        size = export_archive(opened, wanted, path, lambda _: advance())
    if as_json:
        print_json({"path": output, "objects": len(set(wanted)), "bytes": size})
    else:
        note(f"{len(set(wanted))} objects, {show_size(size)}")


def run_import(archive: str, *, store: str | None, as_json: bool) -> None:
    done = import_archive(open_store(store), Path(archive))
    if as_json:
        print_json(asdict(done))
    else:
        note(f"{len(done.keys)} objects, {len(done.new)} of them new")
