"""`pic store`: what the store holds, and whether it is whole. Needs no model and no torch."""

from __future__ import annotations

from typing import Any

from pictool.commands.common import note, open_store, print_json
from pictool.errors import ObjectError, PicError
from pictool.store.store import StoredObject


def run_ls(*, store: str | None, as_json: bool) -> None:
    objects = list(open_store(store).objects())
    if as_json:
        print_json([row(one) for one in objects])
        return
    for one in objects:
        if one.meta is None:
            print(f"{one.key[:12]}  DAMAGED  {one.problem}")
        else:
            text = " ".join(one.text.split())[:48]
            print(f"{one.key[:12]}  {one.meta.num_tokens:6d} tokens  {one.num_bytes:>11,d} bytes  {text}")
    note(f"{len(objects)} objects, {sum(one.num_bytes for one in objects):,d} bytes")


def row(one: StoredObject) -> dict[str, Any]:
    known = {} if one.meta is None else {"tokens": one.meta.num_tokens, "sinks": one.meta.sinks, "text": one.text}
    return {"key": one.key, "bytes": one.num_bytes, "path": str(one.path), "problem": one.problem, **known}


def run_verify(*, store: str | None, as_json: bool) -> None:
    """Read and check every object; a PicError at the end if any is damaged."""
    root = open_store(store)
    problems: dict[str, str] = {}
    keys = root.keys()
    for key in keys:
        try:
            with root.open(key) as found:
                found.verify()
        except PicError as error:
            problems[key] = str(error)
    if as_json:
        print_json({"objects": len(keys), "damaged": problems})
    else:
        for problem in problems.values():
            print(problem)
        if not problems:
            note(f"{len(keys)} objects read, none damaged")
    if problems:
        raise ObjectError(
            f"{root.root}: {len(problems)} of {len(keys)} objects are damaged; delete them, or compile again"
        )
