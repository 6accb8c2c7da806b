"""The file of storage tiers that `pic plan --tiers` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pictool.commands.settings.settings import read_yaml, shown_key
from pictool.controller.decision import STORE_TIER, TierEntry
from pictool.errors import InputError
from pictool.reading import shown

_TIER_KEYS = ("name", "price_gb_month", "read_gb_s", "latency_ms", "path")


def read_tiers(name: str | None) -> list[TierEntry]:
    """The tiers of a file, or the examples that ship with pic.

    Raises:
        InputError: names the file, the tier and the key, and what it must be.
    """
    if name is not None:
        return _parse_tiers(Path(name))
    with as_file(files("pictool.controller") / "tiers.yaml") as path:
        return _parse_tiers(path)


def _parse_tiers(path: Path) -> list[TierEntry]:
    listed = read_yaml(path, ("tiers",)).get("tiers")
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{path}: tiers must be a list of tiers, each with name and price_gb_month")
    entries = [_tier_entry(path, index, tier) for index, tier in enumerate(listed)]
    names = [entry.name for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: name {twice[0]} is used for two tiers; give each its own")
    if STORE_TIER not in names:
        raise InputError(
            f"{path}: has no tier named {STORE_TIER}, where the objects are now; add it with its price_gb_month"
        )
    return entries


def _tier_entry(path: Path, index: int, data: Any) -> TierEntry:
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: tier {index + 1} must be a mapping with the keys {', '.join(_TIER_KEYS)}")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: name of tier {index + 1} must be a text")
    if unknown := [shown_key(key) for key in data if key not in _TIER_KEYS]:
        raise InputError(
            f"{path}: tier {name} has an unknown key {', '.join(unknown)}; known are {', '.join(_TIER_KEYS)}"
        )
    named = {key for key in ("read_gb_s", "path") if data.get(key) is not None}
    if name == STORE_TIER and named:
        raise InputError(f"{path}: tier {name} is measured at the store; leave {' and '.join(named)} out")
    if name != STORE_TIER and len(named) != 1:
        raise InputError(f"{path}: tier {name} must have read_gb_s (stated) or path (measured), one of them")
    if data.get("latency_ms") is not None and "read_gb_s" not in named:
        raise InputError(f"{path}: latency_ms of tier {name} goes with read_gb_s; a measured tier has its own")
    return TierEntry(
        name, _tier_number(path, name, data, "price_gb_month", None), _tier_directory(path, name, data.get("path")),
        _tier_number(path, name, data, "read_gb_s", None) if "read_gb_s" in named else None,
        _tier_number(path, name, data, "latency_ms", 0.0),
    )  # fmt: skip


def _tier_number(path: Path, tier: str, data: Mapping[str, Any], key: str, default: float | None) -> float:
    value = data.get(key, default)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        number = math.nan
    if math.isfinite(number) and (number > 0 or (number == 0 and key != "read_gb_s")):
        return number
    least = "above 0" if key == "read_gb_s" else "0 or more"
    raise InputError(f"{path}: {key} of tier {tier} must be a number, {least}, not {shown(value)}")


def _tier_directory(path: Path, tier: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(f"{path}: path of tier {tier} must be a text; put it in quotes")
    directory = path.parent / value
    if not directory.is_dir():
        raise InputError(
            f"{path}: path of tier {tier}: {value} is not a directory; create it, or state read_gb_s instead"
        )
    return directory
