"""`pic config`: every setting, its value, and where it comes from."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import note
from pictool.commands.settings.options import JsonOption, command, make_app
from pictool.commands.settings.settings import DEFAULT, Settings, find_file, variable
from pictool.escapes import visible
from pictool.store.entries import DEFAULT_ROOT
from pictool.urls import without_credentials

app = make_app()

# What a setting of None stands for.
_DEFAULTS = {"model": "embedded", "store": DEFAULT_ROOT, "remote_rate": "8K"}


@command(app, "config")
def run_config(settings: Settings, as_json: JsonOption = False) -> None:
    """Show each setting and where it comes from.

    A setting comes from an environment variable, from a pic.yaml here or above, or is the default.

    \b
      pic config
      PIC_STORE=~/objects pic config --json
    """
    rows = [_row(settings, field.name) for field in fields(settings) if field.name not in ("strange_file", "origins")]
    if as_json:
        print_json(rows)
        return
    width = max(len(str(row["value"])) for row in rows)
    for row in rows:
        by = row["origin"]
        if by == DEFAULT and row["variable"]:
            by = f"default ({row['variable']})"
        print(visible(f"{row['name']:<15}{row['value']!s:<{min(width, 32)}}  {by}"))
    if find_file() is None:
        note("no pic.yaml in this directory or above it")


def _row(settings: Settings, name: str) -> dict[str, Any]:
    from pictool.linker.policies import DEFAULT as POLICY

    value = getattr(settings, name)
    if name == "salt":
        value = "(set)" if value else ""
    if name == "remote" and value:
        value = without_credentials(value)
    shown = (_DEFAULTS | {"algo": POLICY}).get(name, "") if value is None else value
    return {"name": name, "value": shown, "origin": settings.origin(name), "variable": variable(name)}
