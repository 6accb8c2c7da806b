"""`pic store push|pull`: objects to a remote, and from it. Needs no model and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pictool.commands.common import note, open_store, print_json
from pictool.commands.progress import progress
from pictool.commands.units import show_size
from pictool.store.transfer import Transferred, pull, push

ALL = "all"


def run_push(keys: Sequence[str], *, store: str | None, remote: str | None, as_json: bool) -> None:
    opened = open_store(store, remote)
    is_all = list(keys) == [ALL]  # but for blocks of prefix chains, which no store asks a remote for
    wanted = [one.key for one in opened.objects()] if is_all else [opened.resolve(key) for key in keys]
    with progress("pushing", len(wanted)) as advance:
        done = push(opened, wanted, advance)
    _report(done, "sent", "there", as_json)


def run_pull(keys: Sequence[str], *, store: str | None, remote: str | None, as_json: bool) -> None:
    opened = open_store(store, remote)
    with progress("pulling", len(keys)) as advance:
        done = pull(opened, keys, advance)
    _report(done, "fetched", "here", as_json)


def _report(done: Transferred, verb: str, where: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
    else:
        note(f"{len(done.keys)} objects {verb} ({show_size(done.num_bytes)}), {len(done.present)} were {where} already")
